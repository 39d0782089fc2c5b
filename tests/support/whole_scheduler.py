"""All callers of a run in one object, for tests that are a rank, a client and a supervisor at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

import pytest
import redis

from pipedec.messages.events import Event
from pipedec.scheduler import ClientScheduler, EmbeddedRedis, RankScheduler, SupervisorScheduler, calls, connect
from pipedec.scheduler.client import PATIENCE_SECONDS
from pipedec.scheduler.protocol import Post
from pipedec.scheduler.scripts import LEASE_MS
from pipedec.topology import Topology

_run_numbers = count()


class WholeScheduler(RankScheduler, ClientScheduler, SupervisorScheduler):
    """A scheduler on Redis with the calls of everybody, those of front-ends with an event loop included."""

    def __init__(
        self, client: redis.Redis, run_id: str, topology: Topology, lease_ms: int = LEASE_MS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:  # fmt: skip
        super().__init__(client, run_id, topology)
        self.lease_ms, self.patience_seconds = lease_ms, patience_seconds

    def submit(self, request_json: str, priority: int = 0, operation: str = "", owner: str = "") -> int:
        return self.ask(calls.submit(self.keys, request_json, priority, operation, owner, self.lease_ms))

    def close_answer(self, request_number: int, operation: str = "") -> None:
        self.ask(calls.close_answer(self.keys, request_number, operation))

    def read_answers(self, last: Mapping[int, str], seconds: float) -> list[calls.Arrived]:
        return self.ask(calls.read_answers(self.keys, last, seconds)).events

    def renew_owner(self, owner: str) -> bool:
        return self.client.set(self.keys.owner(owner), "1", px=self.lease_ms, get=True) is not None

    def release_owner(self, owner: str) -> None:
        self.client.delete(self.keys.owner(owner))

    def complete(self, request_number: int, *events: Event) -> None:
        """Publish the last events of an answer."""
        self.publish_all([Post(request_number, events, ends=True)])

    def read_answer(self, request_number: int, last: str, timeout_seconds: float) -> list[tuple[str, Event]]:
        """``read_answers`` of one."""
        return [(position, event) for _, position, event in self.read_answers({request_number: last}, timeout_seconds)]


class FreshRun(WholeScheduler):
    """A run of its own on the Redis server of the tests, which the fixture ``redis_client`` starts."""

    shared: redis.Redis

    def __init__(self, topology: Topology, lease_ms: int = LEASE_MS) -> None:
        super().__init__(self.shared, f"test-{next(_run_numbers)}", topology, lease_ms)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def redis_client(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    FreshRun.shared = connect(redis_server.url)
    yield FreshRun.shared
    FreshRun.shared.close()
