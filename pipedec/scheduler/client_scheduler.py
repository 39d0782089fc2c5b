"""Redis calls of a run's clients, which send requests, or watch or stop the run.

A front-end with one event loop and any number of requests has an ``AsyncConnection`` and the lease of an owner instead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any, Self, TypeVar

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from pipedec.core.errors import EpochEnded
from pipedec.scheduler import calls
from pipedec.scheduler.base import BaseScheduler
from pipedec.scheduler.calls import Call
from pipedec.scheduler.client import CONNECT_SECONDS, PATIENCE_SECONDS, address_of, async_connect, async_patiently, options_of
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.scripts import KEY_SECONDS, LEASE_MS

_T = TypeVar("_T")

RENEW_SECONDS = 1.5  # between two renewals of an owner's lease


class ClientScheduler(BaseScheduler):
    """The scheduler for a client."""

    def cancel(self, request_number: int) -> bool:
        """End a request; False if it is unknown or has ended."""
        return self.ask(calls.cancel(self.keys, request_number))

    def stop(self) -> None:
        """Ask every rank to end after the messages already in its queue, and refuse further requests."""
        while True:  # the epoch may end in between
            epoch = self.current_epoch() or 0
            keys = Keys(self.run_id, epoch)
            with suppress(EpochEnded):
                self._run_script("stop", [keys.run, *map(keys.queue, self.topology.ranks)], [KEY_SECONDS, epoch])
                return

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


class OwnerLease:
    """Renews the lease of ``owner``, which has it already, in a thread with a connection of its own, so that nothing that the
    client computes delays it.
    """

    def __init__(self, redis_url: str, keys: Keys, owner: str) -> None:
        self.owner = owner
        self._client = redis.Redis.from_url(redis_url, **options_of(redis_url, CONNECT_SECONDS))
        self._name = keys.owner(owner)
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


class AsyncConnection:
    """Executes calls for a client with an event loop, over several connections to one server.

    Attributes:
        round_trips: number of commands sent to the server.
    """

    def __init__(self, client: redis.asyncio.Redis, address: str) -> None:
        self.round_trips = 0
        self._client, self._address = client, address

    @classmethod
    async def to(cls, redis_url: str) -> Self:
        """A connection to the server at ``redis_url``. Raises as ``client.connect``."""
        return cls(await async_connect(redis_url), address_of(redis_url))

    async def ask(self, call: Call[_T]) -> _T:
        """Execute a call and return its result. Raises SchedulerLost."""

        async def execute() -> Any:
            try:
                return await self._client.execute_command(*call.words)
            except NoScriptError:  # nothing was executed
                return await self._client.execute_command(*call.with_source())

        self.round_trips += 1
        patience = PATIENCE_SECONDS if call.patience_seconds is None else call.patience_seconds
        return call.read(await async_patiently(execute, self._address, patience))

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self._client.aclose()
