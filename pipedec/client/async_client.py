"""The asyncio client: any number of requests in one event loop, whose answers arrive over one connection. Needs no torch and no
checkpoint.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from pipedec.client.reply import Delta, Reply, TokenArrivals
from pipedec.client.watch import SILENCE_SECONDS, RunWatch, check_silence
from pipedec.cluster.state import no_such_run
from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError, QueueFull, SchedulerBusy, SchedulerLost
from pipedec.live.reading import READ_SECONDS, STATS_SECONDS, Frame, LiveReading
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.scheduler import AsyncRedisScheduler, RunStatus

_READ_SECONDS = 5.0
_LOOK_SECONDS = 1.5  # between two checks of the run
_RETRY_SECONDS = 0.1  # between two attempts to reach Redis

_T = TypeVar("_T")


class AsyncReply:
    """One answer: any number of tasks may wait for it, and one may iterate over it. Made by ``AsyncClient.submit``.

    Attributes:
        reply: the answer so far.
    """

    def __init__(self, scheduler: AsyncRedisScheduler, number: int, arrivals: TokenArrivals) -> None:
        self.reply = Reply(number, self._add, arrivals=arrivals)
        self._scheduler = scheduler
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
            await self._scheduler.cancel(self.number)

    def _add(self, delta: Delta) -> None:
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
        scheduler: the connection; counts its round trips.
        last_status: the latest state of the run, a second or two old; None before the first.
        failure: why there will be no more answers: a rank or Redis is lost, the run was stopped, or this client was closed.
    """

    def __init__(self, scheduler: AsyncRedisScheduler, description: RunDescription, check: Callable[[], None]) -> None:
        self.scheduler = scheduler
        self.description = description
        self.last_status: RunStatus | None = None
        self.failure: PipedecError | None = None
        self._check = check
        self._open: dict[int, AsyncReply] = {}
        self._run = RunWatch()
        self._is_reading = False  # whether ``read_answers`` is waiting for events of all open answers
        self._tasks: set[asyncio.Task[Any]] = set()  # short ones
        self._following = [asyncio.create_task(self._until_lost(work)) for work in (self._follow(), self._watch())]

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
        scheduler = await AsyncRedisScheduler.connect(redis_url, run_id, owner or secrets.token_hex(8))
        if scheduler.description is None:
            await scheduler.disconnect()
            raise no_such_run(run_id)
        return cls(scheduler, scheduler.description, check)

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
        return await self.scheduler.status()

    async def live(self) -> AsyncIterator[list[Frame]]:
        """The live feed (docs/live.md), in batches. Frames of figures come once a second in any case. One reader for each
        client; a gap is reported if Redis was away.

        Raises:
            RankLost, SchedulerLost: the run has ended, or stopped answering.
        """
        reading, position, renewed = LiveReading(self.scheduler.run_id), "", -STATS_SECONDS
        while self.failure is None:
            try:
                if not position:
                    position = await self.scheduler.live_position()
                    await self.scheduler.watch(begins=True)
                if time.monotonic() > renewed + STATS_SECONDS:
                    renewed = time.monotonic()
                    await self.scheduler.watch()
                    yield [reading.stats(await self.scheduler.status())]
                for shown in await self.scheduler.read_live(position, READ_SECONDS):
                    position = shown.position
                    gap = reading.missed(shown)
                    if gap is not None:
                        await self.scheduler.watch(begins=True)
                    yield [*([] if gap is None else [gap]), *reading.on_batch(shown)]
            except SchedulerLost as error:
                await self._bear(error)
                position = ""
        raise self.failure

    async def aclose(self) -> None:
        """Cancel open requests and delete everything in Redis that only this client needs. May be called twice."""
        if not self._following:
            return
        self._lose(PipedecError("the client was closed"))
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, *self._tasks, return_exceptions=True)
        self._following.clear()
        with suppress(PipedecError):
            for number in self._open:
                await self._give_up(number)
            await self.scheduler.release_owner()
        await self.scheduler.disconnect()

    async def _submit(self, request: PromptRequest) -> AsyncReply:
        arrivals = TokenArrivals()  # the clock starts before the request is sent
        request = request.seeded()
        number = await self._queue(request)
        reply = self._open[number] = AsyncReply(self.scheduler, number, arrivals)
        if self.failure is not None:
            reply.end(self.failure)
        elif self._is_reading:
            self._is_reading = False
            await self.scheduler.wake()
        return reply

    async def _queue(self, request: PromptRequest) -> int:
        """Submit the request and return its number; repeat the call if it may not have arrived."""
        operation = secrets.token_hex(8)
        while True:
            try:
                return await self.scheduler.submit(request.to_json(), request.priority, operation)
            except (QueueFull, SchedulerBusy):
                raise
            except SchedulerLost as error:
                await self._bear(error)

    async def _give_up(self, number: int) -> None:
        await self.scheduler.cancel(number)
        await self.scheduler.close_answer(number)

    async def _until_lost(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except PipedecError as error:
            self._lose(error)

    async def _follow(self) -> None:
        """Pass the events of all open answers to their readers."""
        while self.failure is None:
            self._is_reading = True
            positions = {number: reply.reply.position for number, reply in self._open.items()}
            try:
                for number, position, event in await self.scheduler.read_answers(positions, _READ_SECONDS):
                    if (reply := self._open.get(number)) is not None:
                        reply.reply.take(position, event)
            except SchedulerLost as error:
                await self._bear(error)
            self._is_reading = False
            for number in [number for number, reply in self._open.items() if reply.reply.has_ended]:
                self._open.pop(number).end()
                self._begin(self._until_lost(self.scheduler.close_answer(number)))

    async def _watch(self) -> None:
        """Check whether the run still answers, and has kept the requests of this client."""
        while self.failure is None:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                self._check()
                await self._look()
            except SchedulerLost as error:
                await self._bear(error)

    async def _look(self) -> None:
        status = self.last_status = await self.scheduler.status()
        self._run.check(status)
        if self.scheduler.lease is not None and self.scheduler.lease.has_lapsed():
            suspended = "this process did not run for some seconds, and the cluster has cancelled its requests"
            while self._open:
                number, reply = self._open.popitem()
                reply.end(SchedulerLost(suspended))
                self._begin(self._until_lost(self._give_up(number)))
        replies = [reply.reply for reply in self._open.values()]
        for one in replies:
            one.run_recovers(status.is_recovering)
        check_silence(status, replies, SILENCE_SECONDS)

    async def _bear(self, error: PipedecError) -> None:
        """Redis is away: wait before the next attempt. Raises ``error`` if that has lasted for too long."""
        self._check()
        self._run.outage(error)
        for reply in self._open.values():
            reply.reply.run_recovers(True)
        await asyncio.sleep(_RETRY_SECONDS)

    def _lose(self, error: PipedecError) -> None:
        """End all answers: no more events arrive."""
        self.failure = self.failure or error
        for reply in self._open.values():
            reply.end(error)

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run ``work`` in the background; ``aclose`` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
