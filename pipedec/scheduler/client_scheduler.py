"""Redis calls of a run's clients: those who send requests, watch the run, measure it or stop it."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import redis

from pipedec.core import EpochEnded
from pipedec.messages import ActivityReport
from pipedec.scheduler.base import BaseScheduler, activity_of
from pipedec.scheduler.client import BLOCK_SECONDS
from pipedec.scheduler.protocol import WATCH_SECONDS, FrameBatch
from pipedec.scheduler.script_calls import KEY_SECONDS, cancel_call, close_call, shown_of, submit_call
from pipedec.topology import Topology


@dataclass(frozen=True)
class ServerUsage:
    """Load on the Redis server.

    Attributes:
        cpu_seconds: CPU time that the server has used since it started.
        keys: number of keys of the run, without leases.
        is_working: whether a workflow is running: until it has ended, keys come and go.
    """

    cpu_seconds: float
    keys: int
    is_working: bool


class ClientScheduler(BaseScheduler):
    """The scheduler for a client."""

    def __init__(self, client: redis.Redis, run_id: str, topology: Topology) -> None:
        super().__init__(client, run_id, topology)
        self._operations: dict[int, str] = {}  # with which requests were submitted, until their answers are closed

    def submit(self, request_json: str, priority: int = 0, operation: str = "") -> int:
        """Queue a request and return its number.

        Args:
            priority: lower ones are taken first, equal ones in the order of their numbers.
            operation: an id that identifies a call that is repeated because its reply was lost. Empty for none.

        Raises:
            QueueFull: as many requests run and wait as the run allows.
            UserError: the run is not up.
            RankLost: the run has failed.
        """
        number = int(self._run_script(*submit_call(self.keys, request_json, priority, operation), patience_seconds=0.0))
        if operation:
            self._operations[number] = operation
        return number

    def cancel(self, request_number: int) -> bool:
        """End a request: a waiting one at once, a running one when rank 0 reads the cancellation (``Taken``). False if it is
        unknown or has ended.
        """
        return bool(self._run_script(*cancel_call(self.keys, request_number)))

    def close_answer(self, request_number: int) -> None:
        """Delete an answer that has been read, or that will not be read: nothing is written to it any more."""
        self._run_script(*close_call(self.keys, request_number, self._operations.pop(request_number, "")))

    def watch(self, begins: bool = False) -> None:
        """For readers of the live feed: rank 0 publishes it for ``WATCH_SECONDS`` more.

        Args:
            begins: the reader has no state yet, so rank 0 has to publish all of it.
        """
        milliseconds = int(1000 * WATCH_SECONDS)
        if begins or not self._ask(lambda: self.client.pexpire(self.keys.watchers, milliseconds)):
            self._ask(lambda: self.client.set(self.keys.watchers, secrets.token_hex(8), px=milliseconds))

    def live_position(self) -> str:
        """The current end of the live feed: later frames follow this position."""
        newest: Any = self._ask(lambda: self.client.xrevrange(self.keys.live, count=1))
        return newest[0][0].decode() if newest else "0-0"

    def read_live(self, last: str, timeout_seconds: float) -> list[FrameBatch]:
        """Wait for batches of the live feed.

        Args:
            last: position of the last known batch.

        Returns:
            the entries after it; none after ``timeout_seconds``.
        """
        block = max(1, int(min(timeout_seconds, BLOCK_SECONDS) * 1000))
        reply: Any = self._ask(lambda: self.client.xread({self.keys.live: last}, block=block))
        return shown_of(reply)

    def stop(self) -> None:
        """Ask every rank to end after the messages already in its queue, and refuse further requests."""
        while True:  # a client takes part in no epoch
            epoch = self.current_epoch() or 0
            keys = replace(self.keys, epoch=epoch)
            with suppress(EpochEnded):
                self._run_script("stop", [keys.run, *map(keys.queue, self.topology.ranks)], [KEY_SECONDS, epoch])
                return

    def activities(self) -> dict[int, ActivityReport]:
        """The activity of each rank when it last renewed its lease."""
        told: Any = self._ask(lambda: self.client.hgetall(self.keys.doing))
        now_us = self.clock_us()
        return {int(rank): activity_of(text.decode(), now_us) for rank, text in told.items()}

    def nodes(self) -> dict[str, bool]:
        """The supervisors of hosts, by name: whether they hold their leases."""
        names: Any = self._ask(lambda: self.client.smembers(self.keys.nodes))
        found = sorted(name.decode() for name in names)
        alive: Any = self._ask(lambda: self.client.mget([self.keys.node(name) for name in found])) if found else []
        return {name: lease is not None for name, lease in zip(found, alive, strict=True)}

    def places(self) -> dict[int, str]:
        """The host of each rank, as far as supervisors have reported it."""
        told: Any = self._ask(lambda: self.client.hgetall(self.keys.places))
        return {int(rank): node.decode() for rank, node in told.items()}

    def usage(self) -> ServerUsage:
        """The CPU time of the server and the state of the run's keys, for the benchmarks.

        Leases are not counted: on a busy machine one may be renewed too late, and be missing for a moment.
        """
        cpu: Any = self._ask(lambda: self.client.info("cpu"))
        is_working = self._ask(lambda: self.client.hget(self.keys.workflow, "running")) == b"1"
        stored = {key.decode() for key in self._stored()}  # a scan may name a key twice
        num_keys = sum(not self.keys.is_lease(key) for key in stored)
        return ServerUsage(cpu["used_cpu_user"] + cpu["used_cpu_sys"], num_keys, is_working)
