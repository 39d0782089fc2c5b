"""The asyncio client: any number of requests in one event loop, whose answers arrive over one connection. Needs no torch and no
checkpoint.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from pipedec.client.reply import Delta, Reply
from pipedec.client.session import Session
from pipedec.cluster.state import no_such_run
from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError, SchedulerLost
from pipedec.live.reading import Frame, LiveReading
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.scheduler import AsyncConnection, OwnerLease, RunStatus, calls
from pipedec.scheduler.keys import Keys
from pipedec.topology import Topology

_READ_SECONDS = 1.5  # that a turn waits for events

_T = TypeVar("_T")


class AsyncReply:
    """One answer: any number of tasks may wait for it, and one may iterate over it. Made by ``AsyncClient.submit``.

    Attributes:
        reply: the answer so far.
    """

    reply: Reply  # set when its number is known

    def __init__(self, cancel: Callable[[Reply], Awaitable[None]]) -> None:
        self._cancel = cancel
        self._news: Delta | None = None
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._lost: PipedecError | None = None
        self._is_cancelled = False

    @property
    def number(self) -> int:
        return self.reply.number

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield everything since the last delta as one delta, until the answer has ended: a slow reader has no queue.

        Raises:
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        while not self._ended.is_set() or self._news is not None:
            await self._changed.wait()
            self._changed.clear()
            news, self._news = self._news, None
            if news is not None:
                yield news
        if self._lost is not None:
            raise self._lost

    async def completed(self) -> Completion:
        """Wait for the end.

        Raises:
            UserError: the request was refused, or cancelled before it began.
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        await self._ended.wait()
        if self._lost is not None:
            raise self._lost
        return self.reply.completed()

    async def cancel(self) -> None:
        """End the request. Its answer continues until the cluster has ended it. No effect if it has ended.

        Raises:
            SchedulerLost: Redis cannot be reached.
        """
        if not self._is_cancelled and not self._ended.is_set():
            self._is_cancelled = True
            await self._cancel(self.reply)

    def add(self, delta: Delta) -> None:
        self._news = delta if self._news is None else self._news + delta
        self._changed.set()

    def end(self, lost: PipedecError | None = None) -> None:
        """End the answer: no more events arrive; ``lost`` if it is not complete. Only the first call counts."""
        if not self._ended.is_set():
            self._lost = lost
            self._ended.set()
            self._changed.set()


class AsyncClient:
    """Sends requests to a running cluster, as their *owner*: should this process die, they are cancelled. Made by ``connect``.

    Attributes:
        description: of the run.
        connection: counts its round trips.
        failure: why there will be no more answers: a rank or Redis is lost, the run was stopped, or this client was closed.
    """

    def __init__(
        self, connection: AsyncConnection, keys: Keys, description: RunDescription, lease: OwnerLease, check: Callable[[], None]
    ) -> None:
        self.connection = connection
        self.description = description
        self.failure: PipedecError | None = None
        self._keys, self._topology, self._lease = keys, Topology(description.groups), lease
        self._session = Session(connection, keys, self._topology, check, owner=lease.owner)
        self._replies: dict[int, AsyncReply] = {}  # of the session's open answers
        self._is_reading = False  # whether a turn of the session waits for events of all open answers
        self._tasks: set[asyncio.Task[Any]] = set()  # short ones
        self._following: asyncio.Task[None] | None = asyncio.create_task(self._until_lost(self._follow()))

    @property
    def last_status(self) -> RunStatus | None:
        """The latest state of the run, a second or two old; None before the first."""
        return self._session.status

    @classmethod
    async def connect(
        cls, redis_url: str, run_id: str, owner: str | None = None, check: Callable[[], None] = lambda: None
    ) -> AsyncClient:
        """Connect to the run ``run_id``.

        Args:
            owner: the name of this client in the cluster; None for a random one.
            check: called now and then; raises if the cluster is known to be in trouble (``LocalCluster.check``).

        Raises:
            UserError: there is no such run, or another version runs it.
            SchedulerLost: Redis cannot be reached or refuses the password.
        """
        connection, keys, owner = await AsyncConnection.to(redis_url), Keys(run_id), owner or secrets.token_hex(8)
        try:
            if (description := await connection.ask(calls.description(keys))) is None:
                raise no_such_run(run_id)
            await connection.ask(calls.take_lease(keys, owner))
        except BaseException:
            await connection.close()
            raise
        return cls(connection, keys, description, OwnerLease(redis_url, keys, owner), check)

    async def submit(self, request: PromptRequest) -> AsyncReply:
        """Submit a request. If the task that awaits this is cancelled, so is the request.

        Raises:
            QueueFull: as many requests run and wait as the cluster allows.
            UserError: it takes no requests.
            RankLost, SchedulerLost: it died or stopped answering.
        """
        if self.failure is not None:
            raise self.failure
        submitting = self._begin(self._submit(request))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:

            async def forget() -> None:
                with suppress(PipedecError):
                    await (await submitting).cancel()

            self._begin(forget())
            raise

    async def status(self) -> RunStatus:
        """The state of the run. Raises SchedulerLost."""
        return await self.connection.ask(calls.status(self._keys, self._topology))

    async def present_description(self) -> RunDescription | None:
        """The present description of the run: ranks that meet again describe themselves anew. Raises SchedulerLost."""
        return await self.connection.ask(calls.description(self._keys))

    async def live(self) -> AsyncIterator[list[Frame]]:
        """The live feed (docs/live.md), in batches. Frames of figures come once a second in any case. One reader for each
        client; a gap is reported if Redis was away.

        Raises:
            RankLost, SchedulerLost: the run has ended, or stopped answering.
        """
        feed = LiveReading(self._keys.run_id)
        while self.failure is None:
            yield await self._session.live(feed)
        raise self.failure

    async def aclose(self) -> None:
        """Cancel open requests and delete everything in Redis that only this client needs. May be called twice."""
        following, self._following = self._following, None
        if following is None:
            return
        self._lose(PipedecError("the client was closed"))
        following.cancel()
        await asyncio.gather(following, *self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._lease.end)
        with suppress(PipedecError):
            await self._session.give_up(*self._session.open.values())
            await self.connection.ask(calls.release(self._keys, self._lease.owner))
        await self.connection.close()

    async def _submit(self, request: PromptRequest) -> AsyncReply:
        answer = AsyncReply(self._session.cancel)
        answer.reply = await self._session.submit(request, answer.add)
        self._replies[answer.number] = answer
        if self.failure is not None:
            answer.end(self.failure)
        elif self._is_reading:
            self._is_reading = False
            await self.connection.ask(calls.wake(self._keys, self._lease.owner))
        return answer

    async def _until_lost(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except PipedecError as error:
            self._lose(error)

    async def _follow(self) -> None:
        """Pass the events of all open answers to their readers."""
        while self.failure is None:
            lapsed = [*self._session.open.values()] if self._lease.has_lapsed() else []
            self._is_reading = True
            ended = await self._session.turn(_READ_SECONDS, looks=bool(lapsed))
            self._is_reading = False
            for reply in ended:
                self._replies.pop(reply.number).end()
                self._begin(self._until_lost(self._session.close(reply)))
            for reply in lapsed:
                if self._session.open.pop(reply.number, None) is not None:
                    suspended = "this process did not run for some seconds, and the cluster has cancelled its requests"
                    self._replies.pop(reply.number).end(SchedulerLost(suspended))
                    self._begin(self._until_lost(self._session.give_up(reply)))

    def _lose(self, error: PipedecError) -> None:
        """End all answers: no more events arrive."""
        self.failure = self.failure or error
        for reply in self._replies.values():
            reply.end(error)

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run ``work`` in the background; ``aclose`` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
