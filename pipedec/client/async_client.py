"""Requests of a program with an event loop: any number of answers, read together.

A thread reads the events of all open answers from Redis, in one blocked read, and hands them to the event loop; it also keeps
the client's lease, without which the run cancels the client's requests. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pipedec.client.reply import Reply
from pipedec.client.watch import check_run
from pipedec.cluster.state import RunningCluster
from pipedec.core import Completion, PipedecError, UserError
from pipedec.messages import Event, LogprobsEvent, PromptRequest, RunDescription, ThreadNews, TokensEvent, load_validators
from pipedec.scheduler import RedisScheduler
from pipedec.scheduler.protocol import RunStatus

_RENEWAL_SECONDS = 1.5  # of the lease; also the longest read
_CHECK_SECONDS = 2.0  # between two looks at the state of the run

_Events = list[tuple[int, str, Event]]


@dataclass
class Delta:
    """What is new of an answer.

    Attributes:
        logprobs: of ``token_ids``, in order, if requested; empty for answers in threads, whose completion has them.
        threads: news of decode threads, if the request has ``show_threads``.
        is_paused: the answer waits for KV memory now.
        arrived: when the last of it came, in seconds of ``time.perf_counter``.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    threads: list[ThreadNews] = field(default_factory=list)
    is_paused: bool = False
    arrived: float = 0.0


class AsyncReply:
    """One answer while it is generated. Iterate over its deltas, or await ``completed``.

    What has not been read is kept as one delta, so a slow reader costs the memory of one answer.
    """

    def __init__(self, reply: Reply, request: PromptRequest, cancel: Callable[[int], None]) -> None:
        self._reply = reply
        self._in_threads = request.threads is not None
        self._cancel = cancel
        self._delta: Delta | None = None
        self._logprobs: deque[dict[int, float]] = deque()  # of tokens that are yet to come
        self._failure: PipedecError | None = None
        self._changed = asyncio.Event()

    @property
    def number(self) -> int:
        """Of the request."""
        return self._reply.number

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """All that has arrived since the last delta at once, until the answer has ended.

        Raises:
            RankLost, SchedulerLost: the cluster was lost.
        """
        while not self._has_ended or self._delta is not None:
            self._changed.clear()
            if self._delta is not None:
                delta, self._delta = self._delta, None
                yield delta
            elif not self._has_ended:
                await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def completed(self) -> Completion:
        """Wait for the end of the answer.

        Raises:
            UserError: the request was refused, or cancelled before it began.
            RankLost, SchedulerLost: the cluster was lost.
        """
        while not self._has_ended:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        return self._reply.completed()

    async def cancel(self) -> None:
        """End the answer; it completes with the reason ``cancelled``. May be called twice, and after its end.

        Raises:
            SchedulerLost: Redis was lost.
        """
        if not self._has_ended:
            await asyncio.to_thread(self._cancel, self.number)

    @property
    def reply(self) -> Reply:
        """What is known of the answer."""
        return self._reply

    @property
    def _has_ended(self) -> bool:
        return self._reply.has_ended or self._failure is not None

    def take(self, position: str, event: Event) -> None:
        """Handle an event. Raises RankLost if the run has failed."""
        was_paused = self._reply.is_paused
        self._reply.take(position, event)
        match event:
            case LogprobsEvent(rows) if not self._in_threads:
                self._logprobs += map(dict, rows)
            case TokensEvent(token_ids, text, threads):
                self._add(text, token_ids, threads or [])
        if self._reply.is_paused != was_paused:
            self._add("", [], [])
        self._changed.set()

    def fail(self, error: PipedecError) -> None:
        """No further events come."""
        self._failure = error
        self._changed.set()

    def _add(self, text: str, token_ids: Sequence[int], threads: list[ThreadNews]) -> None:
        delta = self._delta = self._delta or Delta()
        delta.text += text
        delta.token_ids += token_ids
        delta.logprobs += [self._logprobs.popleft() for _ in range(min(len(token_ids), len(self._logprobs)))]
        delta.threads += threads
        delta.is_paused, delta.arrived = self._reply.is_paused, time.perf_counter()


class AsyncClient:
    """Sends requests to a running cluster from one event loop. Close it with ``aclose``.

    Attributes:
        description: of the run.
        owner: name of the lease of all its requests: when this process dies, they are cancelled.
    """

    def __init__(self, scheduler: RedisScheduler, description: RunDescription) -> None:
        self.description = description
        self.owner = secrets.token_hex(8)
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, AsyncReply] = {}  # changed by the event loop alone
        self._failure: PipedecError | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, name="answers", daemon=True)
        self._thread.start()

    @classmethod
    async def connect(cls, redis_url: str, run_id: str) -> AsyncClient:
        """Connect to a run.

        Raises:
            UserError: there is no such run, or another version runs it.
            SchedulerLost: Redis cannot be reached.
        """
        scheduler, description = await asyncio.to_thread(_connected, redis_url, run_id)
        return cls(scheduler, description)

    @property
    def failure(self) -> PipedecError | None:
        """Why no answers come any more; None while they do."""
        return self._failure

    async def submit(self, request: PromptRequest) -> AsyncReply:
        """Submit a request.

        Raises:
            QueueFull: as many requests are unfinished as the run allows.
            UserError: the run takes no requests.
            RankLost, SchedulerLost: the run is lost.
        """
        if self._failure is not None:
            raise self._failure
        arrivals = Reply(-1).arrivals  # the clock runs before the request is on its way
        submitted = asyncio.ensure_future(asyncio.to_thread(self._submit, request))
        try:
            number = await asyncio.shield(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(self._abandon)
            raise
        reply = AsyncReply(Reply(number, arrivals=arrivals), request, self._scheduler.cancel)
        self._open[number] = reply
        await asyncio.to_thread(self._scheduler.nudge, self.owner)
        return reply

    async def status(self) -> RunStatus:
        """The state of the run. Raises SchedulerLost if Redis cannot be reached."""
        return await asyncio.to_thread(self._scheduler.status)

    @property
    def round_trips(self) -> int:
        """Commands sent to Redis so far."""
        return self._scheduler.round_trips

    async def aclose(self) -> None:
        """Cancel what is open, and leave nothing in Redis. May be called twice."""
        if self._is_closing:
            return
        self._is_closing = True
        with suppress(PipedecError):
            await asyncio.to_thread(self._leave, list(self._open))
        await asyncio.to_thread(self._thread.join)
        self._fail(PipedecError("the client was closed"))
        self._scheduler.client.close()

    def _submit(self, request: PromptRequest) -> int:
        return self._scheduler.submit(request.to_json(), request.priority, self.owner)

    def _abandon(self, submitted: asyncio.Future[int]) -> None:
        """The caller went away while its request was on its way."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._loop.run_in_executor(None, self._end, submitted.result())

    def _end(self, number: int) -> None:
        """Cancel a request that nobody reads."""
        with suppress(PipedecError):
            self._scheduler.cancel(number)
            self._scheduler.close_answer(number)

    def _leave(self, numbers: list[int]) -> None:
        try:
            for number in numbers:
                self._scheduler.cancel(number)
                self._scheduler.close_answer(number)
            self._scheduler.release_owner(self.owner)
        finally:
            self._scheduler.nudge(self.owner)  # the thread sees that it is to end

    def _read(self) -> None:
        """What the thread does."""
        scheduler, positions = self._scheduler, dict[int, str]()
        renewed = checked = 0.0
        try:
            while not self._is_closing:
                if time.monotonic() > renewed + _RENEWAL_SECONDS:
                    renewed = time.monotonic()
                    scheduler.renew_owner(self.owner)
                positions = {number: positions.get(number, "0") for number in list(self._open)}
                events = scheduler.read_answers(positions, _RENEWAL_SECONDS, self.owner)
                for number, position, _ in events:
                    positions[number] = position
                self._tell(self._take, events)
                if time.monotonic() > checked + _CHECK_SECONDS:
                    checked = time.monotonic()
                    self._tell(self._judge, scheduler.status())
            scheduler.forget_nudges(self.owner)
        except PipedecError as error:
            self._tell(self._fail, error)

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(what, *arguments)

    def _take(self, events: _Events) -> None:
        for number, position, event in events:
            if (reply := self._open.get(number)) is None:
                continue
            try:
                reply.take(position, event)
            except PipedecError as error:
                self._fail(error)
                return
            if reply.reply.has_ended:
                del self._open[number]
                self._loop.run_in_executor(None, self._close_answer, number)

    def _close_answer(self, number: int) -> None:
        with suppress(PipedecError):
            self._scheduler.close_answer(number)

    def _judge(self, status: RunStatus) -> None:
        try:
            check_run(status, [reply.reply for reply in self._open.values()])
        except PipedecError as error:
            self._fail(error)

    def _fail(self, error: PipedecError) -> None:
        self._failure = self._failure or error
        for reply in self._open.values():
            reply.fail(self._failure)
        self._open.clear()


def _connected(redis_url: str, run_id: str) -> tuple[RedisScheduler, RunDescription]:
    load_validators()  # not while the first token is on its way
    scheduler = RunningCluster(redis_url, run_id).connect()
    description = RedisScheduler.describe(scheduler.client, run_id)
    if description is None:
        raise UserError(f"the cluster {run_id!r} has ended: start it again")
    return scheduler, description
