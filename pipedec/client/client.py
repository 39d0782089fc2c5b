"""The blocking client: submits requests, reads all answers together while they are generated, cancels them. Needs no torch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from pipedec.client.reply import Delta, OnDelta, Reply, TokenArrivals
from pipedec.client.watch import LOOK_SECONDS, SILENCE_SECONDS, RunWatch, check_silence
from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError, QueueFull, SchedulerBusy, SchedulerLost, UserError
from pipedec.live.reading import READ_SECONDS, STATS_SECONDS, Frame, LiveReading
from pipedec.messages.events import AbortEvent, ThreadNews
from pipedec.messages.request import PromptRequest
from pipedec.scheduler import ClientScheduler

_CHECK_SECONDS = 0.25  # between two calls of ``check`` while no event arrives
_QUIET_LOOK_SECONDS = 0.5  # between two checks of the run while no event arrives
_RETRY_SECONDS = 0.1  # between two attempts to reach Redis

OnText = Callable[[str], None]
OnThreads = Callable[[list[ThreadNews]], None]
OnPause = Callable[[bool], None]  # whether the answer is paused from now on


def _ignore(news: object) -> None: ...


class Client:
    """Sends requests to a running cluster, and waits while it recovers. Used from one thread.

    Args:
        check: called while waiting; raises if the cluster is known to be in trouble (``LocalCluster.check``). None to rely on the
            status in Redis, read every two seconds.
        silence_seconds: how long to wait for the next event of an answer before the cluster counts as lost.
    """

    def __init__(
        self, scheduler: ClientScheduler, check: Callable[[], None] | None = None, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self._scheduler = scheduler
        self._check = check or (lambda: None)
        self._waits_seconds = LOOK_SECONDS if check is None else _CHECK_SECONDS
        self._silence_seconds = silence_seconds
        self._open: dict[int, Reply] = {}
        self._watch = RunWatch()
        self._looked = 0.0

    def ask(
        self, request: PromptRequest, on_text: OnText = _ignore, on_threads: OnThreads = _ignore, on_pause: OnPause = _ignore
    ) -> Completion:
        """Submit a request and wait for its completion. If it resumes an answer, callbacks receive only the new part.

        Ctrl-C, or any other exception in a callback, cancels the request and is raised again; the cluster continues with others.

        Args:
            on_text: receives the text in pieces.
            on_threads: receives the news of decode threads if the request has ``show_threads``.
            on_pause: receives True when the answer is paused because KV memory is short, False when it continues.

        Raises:
            UserError: the cluster refused the request.
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        return self.follow(request, on_text, on_threads, on_pause).completed()

    def follow(
        self, request: PromptRequest, on_text: OnText = _ignore, on_threads: OnThreads = _ignore, on_pause: OnPause = _ignore
    ) -> Reply:
        """As ``ask``, but returns everything that was received; a refusal is the reply's ``error``."""
        with self.cancelling():
            reply = self.submit(request, on_text, on_threads, on_pause)
            while not reply.has_ended:
                self.read()
        return reply

    def ask_all(
        self,
        requests: Sequence[PromptRequest],
        on_text: Callable[[int, str], None] = lambda index, text: None,
        on_end: Callable[[int], None] = lambda index: None,
    ) -> list[Reply]:
        """Submit all requests at once and wait until every answer has ended, in any order. Returns the replies in their order.

        A request that is refused or cancelled has an ``error``; the others continue. An exception in a callback cancels all.

        Args:
            on_text: receives the index of a request and the text of its answer in pieces.
            on_end: receives the index of a request whose answer has ended, or that was refused.

        Raises:
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        with self.cancelling():
            replies: list[Reply] = []
            for index, request in enumerate(requests):
                try:
                    replies.append(self.submit(request, partial(on_text, index)))
                except UserError as error:  # the queue is full
                    replies.append(Reply(-1, error=error))
            indices = {id(reply): index for index, reply in enumerate(replies)}
            for index, reply in enumerate(replies):
                if reply.has_ended:
                    on_end(index)
            while self._open:
                for reply in self.read():
                    on_end(indices[id(reply)])
        return replies

    def live(self) -> Iterator[Frame]:
        """The live feed (docs/live.md), until the run ends. Frames of figures come once a second in any case.

        Raises:
            RankLost, SchedulerLost: the run has ended, or stopped answering.
        """
        reading, position, watch = LiveReading(self._scheduler.run_id), self._scheduler.live_position(), RunWatch()
        self._scheduler.watch(begins=True)
        renewed = -STATS_SECONDS
        while True:
            if time.monotonic() > renewed + STATS_SECONDS:
                renewed = time.monotonic()
                self._scheduler.watch()
                status = self._scheduler.status()
                watch.check(status)
                yield reading.stats(status)
            for shown in self._scheduler.read_live(position, READ_SECONDS):
                position = shown.position
                if (gap := reading.missed(shown)) is not None:
                    self._scheduler.watch(begins=True)
                    yield gap
                yield from reading.on_batch(shown)

    def submit(
        self, request: PromptRequest, on_text: OnText = _ignore, on_threads: OnThreads = _ignore, on_pause: OnPause = _ignore
    ) -> Reply:
        """Submit a request; ``read`` then follows its answer. Raises UserError if the run takes no requests."""
        arrivals = TokenArrivals()  # the clock starts before the request is sent
        request = request.seeded()
        number = self._submit(request)
        reply = self._open[number] = Reply(number, _calling(on_text, on_threads, on_pause), arrivals=arrivals)
        return reply

    def read(self, timeout_seconds: float | None = None) -> list[Reply]:
        """Wait for events of any open answer and handle them. Returns the replies that have ended.

        Args:
            timeout_seconds: wait at most this long; None to wait until the next check is due.

        Raises:
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        timeout = self._waits_seconds if timeout_seconds is None else timeout_seconds
        if not self._open:
            time.sleep(timeout)
            return []
        events = []
        try:
            events = self._scheduler.read_answers({number: reply.position for number, reply in self._open.items()}, timeout)
        except SchedulerLost as error:
            self._bear(error)
        for number, position, event in events:
            if isinstance(event, AbortEvent):
                self._check()  # the supervisor knows better than other ranks how a process ended
            self._open[number].take(position, event)
        if not events:
            self._check()
        if time.monotonic() > self._looked + (LOOK_SECONDS if events else _QUIET_LOOK_SECONDS):
            self._look()
        ended = [reply for reply in self._open.values() if reply.has_ended]
        for reply in ended:
            del self._open[reply.number]
            self._scheduler.close_answer(reply.number)
        return ended

    def cancel(self, reply: Reply) -> None:
        """End a request; its answer continues until the cluster has ended it."""
        self._scheduler.cancel(reply.number)

    def is_up(self) -> bool:
        """Whether the run takes requests."""
        return self._scheduler.status().state == "up"

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """On any exit from the body, cancel the answers that are still open and forget them."""
        try:
            yield
        except BaseException:
            with suppress(PipedecError):
                for number in self._open:
                    self._scheduler.cancel(number)
                    self._scheduler.close_answer(number)
            raise
        finally:
            self._open.clear()

    def _submit(self, request: PromptRequest) -> int:
        """Submit the request and return its number; repeat the call if it may not have arrived."""
        operation = secrets.token_hex(8)
        while True:
            try:
                return self._scheduler.submit(request.to_json(), request.priority, operation=operation)
            except (QueueFull, SchedulerBusy):
                raise
            except SchedulerLost as error:
                self._bear(error)

    def _look(self) -> None:
        """Raises RankLost if the cluster has failed or ended, or an answer has been silent for too long without waiting."""
        self._check()
        try:
            status = self._scheduler.status()
            self._watch.check(status)
            for reply in self._open.values():
                reply.run_recovers(status.is_recovering)
            check_silence(status, self._open.values(), self._silence_seconds)
        except SchedulerLost as error:
            self._bear(error)
        self._looked = time.monotonic()

    def _bear(self, error: PipedecError) -> None:
        """Redis is away: wait before the next attempt. Raises ``error`` if that has lasted for too long."""
        self._check()
        self._watch.outage(error)
        for reply in self._open.values():
            reply.run_recovers(True)
        time.sleep(_RETRY_SECONDS)


def _calling(on_text: OnText, on_threads: OnThreads, on_pause: OnPause) -> OnDelta:
    """Pass new parts of an answer to the callbacks that they concern."""
    was_paused = False

    def on_delta(delta: Delta) -> None:
        nonlocal was_paused
        if delta.token_ids or delta.text or delta.threads:
            on_text(delta.text)
            on_threads(delta.threads)
        if delta.is_paused != was_paused:
            was_paused = delta.is_paused
            on_pause(was_paused)

    return on_delta
