"""The scheduler for a front-end with one event loop and any number of requests: submitting, reading, cancelling.

The same keys, scripts and errors as ``ClientScheduler``.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Self

import redis.asyncio
from redis.exceptions import NoScriptError

from pipedec.messages import Event, RunDescription
from pipedec.scheduler.client import PATIENCE_SECONDS, address_of, async_connect, async_patiently
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.protocol import WATCH_SECONDS, FrameBatch, RunStatus
from pipedec.scheduler.script_calls import (
    LEASE_MS,
    Call,
    cancel_call,
    close_call,
    events_read,
    look_call,
    shown_of,
    status_of,
    submit_call,
)
from pipedec.scheduler.scripts import script_sha, script_text
from pipedec.topology import Topology
from pipedec.validation import parse_json


class AsyncRedisScheduler:
    """One run on one Redis server, for requests of one owner. Every call may raise SchedulerLost.

    Attributes:
        description: of the run; None if there is none.
        round_trips: the commands sent to the server.
    """

    def __init__(self, client: redis.asyncio.Redis, address: str, run_id: str, owner: str) -> None:
        self.round_trips = 0
        self.description: RunDescription | None = None
        self.lease_seconds = LEASE_MS / 1000
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
            text: Any = await scheduler._ask(lambda: scheduler._client.hget(scheduler._keys.run, "description"))
            if text is not None:
                scheduler.description = parse_json(RunDescription, text, "the description of the run")
                await scheduler.renew_owner()
        except BaseException:
            await scheduler.disconnect()
            raise
        return scheduler

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self._keys.run_id

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
        if reply and reply[0][0] == wake.encode():  # in the order of the question
            self._woken = reply.pop(0)[1][-1][0].decode()
        return events_read(self._keys, reply)

    async def wake(self) -> None:
        """Let ``read_answers``, which another task awaits, return now, or at its next call."""
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

    async def renew_owner(self) -> bool:
        """Renew the owner's lease. False if it had none: then its requests have ended, or will."""
        owner = self._keys.owner(self._owner)
        return await self._ask(lambda: self._client.set(owner, "1", px=LEASE_MS, get=True)) is not None

    async def release_owner(self) -> None:
        """Give up the owner's lease: its remaining requests end. No client waits for their answers any more."""
        names = self._keys.owner(self._owner), self._keys.wake(self._owner)
        await self._ask(lambda: self._client.delete(*names))

    async def disconnect(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _run(self, call: Call, patience_seconds: float = PATIENCE_SECONDS) -> Any:
        return await self._ask(partial(self._evaluate, call), patience_seconds)

    async def _evaluate(self, call: Call) -> Any:
        arguments = [len(call.keys), *call.keys, *call.arguments]
        try:
            return await self._client.evalsha(script_sha(call.script), *arguments)
        except NoScriptError:  # nothing was executed: this server does not have the script yet
            return await self._client.eval(script_text(call.script), *arguments)

    async def _ask(self, command: Callable[[], Awaitable[Any]], patience_seconds: float = PATIENCE_SECONDS) -> Any:
        self.round_trips += 1
        return await async_patiently(command, self._address, patience_seconds)
