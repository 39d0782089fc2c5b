"""A real Redis server for the whole session, and schedulers of both kinds made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import redis
from support.memory_scheduler import MemoryScheduler
from support.whole_scheduler import Scheduler, WholeScheduler

from pipedec.scheduler import EmbeddedServer, connect
from pipedec.topology import Topology

_run_numbers = count()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def redis_client(redis_server: EmbeddedServer) -> Iterator[redis.Redis]:
    client = connect(redis_server.url)
    yield client
    client.close()


@pytest.fixture
def make_redis_scheduler(redis_client: redis.Redis) -> Callable[[Topology], WholeScheduler]:
    return lambda topology: WholeScheduler(redis_client, f"test-{next(_run_numbers)}", topology, lease_ms=50)


@pytest.fixture(params=["memory", "redis"])
def make_scheduler(request: pytest.FixtureRequest) -> Callable[[Topology], Scheduler]:
    """Makes schedulers of both kinds, so that one suite runs on both."""
    if request.param == "memory":
        return lambda topology: MemoryScheduler(topology, lease_seconds=0.05)
    made: Callable[[Topology], Scheduler] = request.getfixturevalue("make_redis_scheduler")
    return made
