"""Redis calls of a run's clients, which send requests, or watch, measure or stop the run.

``AsyncRedisScheduler`` is for a front-end with one event loop and any number of requests; it uses the same keys, scripts and
errors.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from pipedec.core.errors import EpochEnded
from pipedec.messages.events import Event
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import ActivityReport
from pipedec.scheduler.base import BaseScheduler, activity_of
from pipedec.scheduler.client import (
    BLOCK_SECONDS,
    CONNECT_SECONDS,
    PATIENCE_SECONDS,
    address_of,
    async_connect,
    async_patiently,
    options_of,
)
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.protocol import WATCH_SECONDS, FrameBatch, RunStatus
from pipedec.scheduler.scripts import (
    KEY_SECONDS,
    LEASE_MS,
    Call,
    cancel_call,
    close_call,
    events_read,
    look_call,
    script_sha,
    script_text,
    shown_of,
    status_of,
    submit_call,
)
from pipedec.topology import Topology
from pipedec.validation import parse_json

RENEW_SECONDS = 1.5  # between two renewals of an owner's lease


@dataclass(frozen=True)
class ServerUsage:
    """Load on the Redis server.

    Attributes:
        cpu_seconds: CPU time of the server since it started.
        keys: number of keys of the run, without leases.
        is_working: whether a workflow is running, so that the number of keys varies.
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
        """Delete an answer that has been read or is no longer wanted; nothing more is written to it."""
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
        while True:  # the epoch may end in between
            epoch = self.current_epoch() or 0
            keys = Keys(self.run_id, epoch)
            with suppress(EpochEnded):
                self._run_script("stop", [keys.run, *map(keys.queue, self.topology.ranks)], [KEY_SECONDS, epoch])
                return

    def activities(self) -> dict[int, ActivityReport]:
        """The activity of each rank when it last renewed its lease."""
        records: Any = self._ask(lambda: self.client.hgetall(self.keys.doing))
        now_us = self.clock_us()
        return {int(rank): activity_of(text.decode(), now_us) for rank, text in records.items()}

    def nodes(self) -> dict[str, bool]:
        """Whether each host's supervisor holds its lease, by the host's name."""
        names: Any = self._ask(lambda: self.client.smembers(self.keys.nodes))
        found = sorted(name.decode() for name in names)
        alive: Any = self._ask(lambda: self.client.mget([self.keys.node(name) for name in found])) if found else []
        return {name: lease is not None for name, lease in zip(found, alive, strict=True)}

    def places(self) -> dict[int, str]:
        """The host of each rank, as far as supervisors have reported it."""
        nodes: Any = self._ask(lambda: self.client.hgetall(self.keys.places))
        return {int(rank): node.decode() for rank, node in nodes.items()}

    def usage(self) -> ServerUsage:
        """The CPU time of the server and the state of the run's keys, for the benchmarks. Leases are not counted, as one that is
        renewed too late on a busy machine may be missing for a moment.
        """
        cpu: Any = self._ask(lambda: self.client.info("cpu"))
        is_working = self._ask(lambda: self.client.hget(self.keys.workflow, "running")) == b"1"
        stored = {key.decode() for key in self._stored()}  # a scan may name a key twice
        num_keys = sum(not self.keys.is_lease(key) for key in stored)
        return ServerUsage(cpu["used_cpu_user"] + cpu["used_cpu_sys"], num_keys, is_working)


class OwnerLease:
    """Renews the lease of a client's requests in a thread with a connection of its own, so that nothing that the client computes
    delays it. The client has the lease already.
    """

    def __init__(self, redis_url: str, name: str) -> None:
        self._client = redis.Redis.from_url(redis_url, **options_of(redis_url, CONNECT_SECONDS))
        self._name = name
        self._has_ended, self._has_lapsed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def has_lapsed(self) -> bool:
        """Whether the lease has expired since the last call although Redis was there: then the requests have ended, or will."""
        has_lapsed = self._has_lapsed.is_set()
        self._has_lapsed.clear()
        return has_lapsed

    def end(self) -> None:
        """Renew it no more. Waits for a renewal that is being made."""
        self._has_ended.set()
        self._thread.join()

    def _renew(self) -> None:
        renewed: float | None = time.monotonic()  # None if Redis was away since the last renewal
        with self._client:
            while not self._has_ended.wait(RENEW_SECONDS):
                try:
                    had_lease = self._client.set(self._name, "1", px=LEASE_MS, get=True) is not None
                except (redis.RedisError, OSError):
                    renewed = None
                    continue
                now = time.monotonic()
                if renewed is not None and (not had_lease or now > renewed + LEASE_MS / 1000):
                    self._has_lapsed.set()
                renewed = now


class AsyncRedisScheduler:
    """The scheduler for a client with an event loop, whose requests have this client as their owner. Every call may raise
    SchedulerLost.

    Attributes:
        description: of the run; None if there is no such run.
        lease: the owner's; None if there is no such run.
        round_trips: number of commands sent to the server.
    """

    def __init__(self, client: redis.asyncio.Redis, address: str, run_id: str, owner: str) -> None:
        self.round_trips = 0
        self.description: RunDescription | None = None
        self.lease: OwnerLease | None = None
        self._client = client
        self._address = address
        self._keys = Keys(run_id)
        self._owner = owner
        self._operations: dict[int, str] = {}  # with which requests were submitted, until their answers are closed
        self._woken = "0"  # position in the stream that wakes the reader

    @classmethod
    async def connect(cls, redis_url: str, run_id: str, owner: str) -> Self:
        """Connect, and take a lease for ``owner`` if there is such a run.

        Raises:
            SchedulerLost: the server cannot be reached, refuses the password or is too old.
            UserError: ``redis_url`` is not such a URL, or another version runs the run.
        """
        scheduler = cls(await async_connect(redis_url), address_of(redis_url), run_id, owner)
        try:
            scheduler.description = await scheduler.present_description()
            if scheduler.description is not None:
                owner_key = scheduler._keys.owner(owner)
                await scheduler._ask(lambda: scheduler._client.set(owner_key, "1", px=LEASE_MS))
                scheduler.lease = OwnerLease(redis_url, owner_key)
        except BaseException:
            await scheduler.disconnect()
            raise
        return scheduler

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self._keys.run_id

    async def present_description(self) -> RunDescription | None:
        """As ``read_description``: ranks that meet again describe themselves anew."""
        text: Any = await self._ask(lambda: self._client.hget(self._keys.run, "description"))
        return None if text is None else parse_json(RunDescription, text, "the description of the run")

    async def submit(self, request_json: str, priority: int = 0, operation: str = "") -> int:
        """As ``ClientScheduler.submit``; the request needs the owner's lease until its answer is closed."""
        call = submit_call(self._keys, request_json, priority, operation, self._owner)
        number = int(await self._run(call, 0.0))
        if operation:
            self._operations[number] = operation
        return number

    async def read_answers(self, last: Mapping[int, str], timeout_seconds: float) -> list[tuple[int, str, Event]]:
        """As ``ClientScheduler.read_answers``, but returns early, with the events so far, after ``wake``."""
        wake = self._keys.wake(self._owner)
        streams: Any = {wake: self._woken, **{self._keys.answer(number): position for number, position in last.items()}}
        block = max(1, int(timeout_seconds * 1000))
        reply: Any = await self._ask(lambda: self._client.xread(streams, block=block))
        if reply and reply[0][0] == wake.encode():  # the reply has the order of ``streams``
            self._woken = reply.pop(0)[1][-1][0].decode()
        return events_read(self._keys, reply)

    async def wake(self) -> None:
        """Let ``read_answers`` in another task return now, or at its next call."""
        pipe = self._client.pipeline(transaction=True)
        pipe.xadd(self._keys.wake(self._owner), {"wake": ""}, maxlen=1)
        pipe.pexpire(self._keys.wake(self._owner), LEASE_MS)
        await self._ask(pipe.execute)

    async def watch(self, begins: bool = False) -> None:
        """As ``ClientScheduler.watch``."""
        milliseconds = int(1000 * WATCH_SECONDS)
        if begins or not await self._ask(lambda: self._client.pexpire(self._keys.watchers, milliseconds)):
            await self._ask(lambda: self._client.set(self._keys.watchers, secrets.token_hex(8), px=milliseconds))

    async def live_position(self) -> str:
        """As ``ClientScheduler.live_position``."""
        newest: Any = await self._ask(lambda: self._client.xrevrange(self._keys.live, count=1))
        return newest[0][0].decode() if newest else "0-0"

    async def read_live(self, last: str, timeout_seconds: float) -> list[FrameBatch]:
        """As ``ClientScheduler.read_live``."""
        block = max(1, int(timeout_seconds * 1000))
        reply: Any = await self._ask(lambda: self._client.xread({self._keys.live: last}, block=block))
        return shown_of(reply)

    async def cancel(self, request_number: int) -> None:
        """As ``ClientScheduler.cancel``."""
        await self._run(cancel_call(self._keys, request_number))

    async def close_answer(self, request_number: int) -> None:
        """As ``ClientScheduler.close_answer``."""
        await self._run(close_call(self._keys, request_number, self._operations.pop(request_number, "")))

    async def status(self) -> RunStatus:
        """As ``ClientScheduler.status``."""
        assert self.description is not None
        return status_of(await self._run(look_call(self._keys, Topology(self.description.groups))))

    async def release_owner(self) -> None:
        """Give up the owner's lease: its remaining requests end. No client waits for their answers any more."""
        if self.lease is not None:
            await asyncio.to_thread(self.lease.end)
        names = self._keys.owner(self._owner), self._keys.wake(self._owner)
        await self._ask(lambda: self._client.delete(*names))

    async def disconnect(self) -> None:
        """Close all connections. The owner's lease expires soon."""
        if self.lease is not None:
            await asyncio.to_thread(self.lease.end)
        await self._client.aclose()

    async def _run(self, call: Call, patience_seconds: float = PATIENCE_SECONDS) -> Any:
        arguments = [len(call.keys), *call.keys, *call.arguments]

        async def evaluate() -> Any:
            try:
                return await self._client.evalsha(script_sha(call.script), *arguments)
            except NoScriptError:  # nothing was executed: this server does not have the script yet
                return await self._client.eval(script_text(call.script), *arguments)

        return await self._ask(evaluate, patience_seconds)

    async def _ask(self, command: Callable[[], Awaitable[Any]], patience_seconds: float = PATIENCE_SECONDS) -> Any:
        self.round_trips += 1
        return await async_patiently(command, self._address, patience_seconds)
