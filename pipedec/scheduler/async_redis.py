"""The scheduler as a front-end needs it that has one event loop and any number of requests: submitting, reading, cancelling.

The same keys, scripts and errors as ``RedisScheduler``; ranks do not use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import redis.asyncio
from redis.exceptions import NoScriptError

from pipedec.messages import Event, RunDescription, description_from_json
from pipedec.scheduler.client import address_of, async_connect, translated_errors
from pipedec.scheduler.client_calls import (
    LEASE_MS,
    Call,
    cancel_call,
    close_call,
    events_read,
    look_call,
    submit_call,
)
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.protocol import RunStatus
from pipedec.scheduler.redis_scheduler import status_of
from pipedec.scheduler.scripts import script_sha, script_text
from pipedec.topology import Topology


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
        self._woken = "0"  # position in the stream that wakes the reader up

    @classmethod
    async def connect(cls, redis_url: str, run_id: str, owner: str) -> Self:
        """Connect, and take a lease for ``owner`` if there is such a run.

        Raises:
            SchedulerLost: the server cannot be reached, refuses the password or is too old.
            UserError: ``redis_url`` is no such URL, or another version runs the run.
        """
        scheduler = cls(await async_connect(redis_url), address_of(redis_url), run_id, owner)
        try:
            with scheduler._command():
                text: Any = await scheduler._client.hget(scheduler._keys.run, "description")
            if text is not None:
                scheduler.description = description_from_json(text.decode())
                await scheduler.renew_owner()
        except BaseException:
            await scheduler.disconnect()
            raise
        return scheduler

    async def submit(self, request_json: str, priority: int = 0) -> int:
        """As ``Scheduler.submit``; the request needs the owner's lease until its answer is closed."""
        return int(await self._run(submit_call(self._keys, request_json, priority, self._owner, LEASE_MS)))

    async def read_answers(self, last: Mapping[int, str], timeout_seconds: float) -> list[tuple[int, str, Event]]:
        """As ``Scheduler.read_answers``, but returns early, with what there is, after ``wake``."""
        wake = self._keys.wake(self._owner)
        streams: Any = {wake: self._woken, **{self._keys.answer(number): position for number, position in last.items()}}
        with self._command():
            reply: Any = await self._client.xread(streams, block=max(1, int(timeout_seconds * 1000)))
        if reply and reply[0][0] == wake.encode():  # in the order of the question
            self._woken = reply.pop(0)[1][-1][0].decode()
        return events_read(self._keys, reply)

    async def wake(self) -> None:
        """Let ``read_answers``, which another task awaits, return now, or when it is called next."""
        pipe = self._client.pipeline(transaction=True)
        pipe.xadd(self._keys.wake(self._owner), {"wake": ""}, maxlen=1)
        pipe.pexpire(self._keys.wake(self._owner), LEASE_MS)
        with self._command():
            await pipe.execute()

    async def cancel(self, request_number: int) -> None:
        """As ``Scheduler.cancel``."""
        await self._run(cancel_call(self._keys, request_number))

    async def close_answer(self, request_number: int) -> None:
        """As ``Scheduler.close_answer``."""
        await self._run(close_call(self._keys, request_number))

    async def status(self) -> RunStatus:
        """As ``Scheduler.status``."""
        assert self.description is not None
        return status_of(await self._run(look_call(self._keys, Topology(self.description.groups))))

    async def renew_owner(self) -> bool:
        """As ``Scheduler.renew_owner``."""
        with self._command():
            return await self._client.set(self._keys.owner(self._owner), "1", px=LEASE_MS, get=True) is not None

    async def release_owner(self) -> None:
        """As ``Scheduler.release_owner``; nobody waits for answers any more."""
        with self._command():
            await self._client.delete(self._keys.owner(self._owner), self._keys.wake(self._owner))

    async def disconnect(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _run(self, call: Call) -> Any:
        arguments = [len(call.keys), *call.keys, *call.arguments]
        with self._command():
            try:
                return await self._client.evalsha(script_sha(call.script), *arguments)
            except NoScriptError:  # nothing has run: this server does not have the script yet
                return await self._client.eval(script_text(call.script), *arguments)

    @contextmanager
    def _command(self) -> Iterator[None]:
        self.round_trips += 1
        with translated_errors(self._address):
            yield
