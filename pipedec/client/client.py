"""The blocking client: submits requests, reads all answers together while they are generated, cancels them. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

from pipedec.client.reply import Delta, OnDelta, Reply
from pipedec.client.session import LOOK_SECONDS, SILENCE_SECONDS, Session
from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError, UserError
from pipedec.live.reading import Frame, LiveReading
from pipedec.messages.events import ThreadNews
from pipedec.messages.request import PromptRequest
from pipedec.scheduler import ClientScheduler, RunStatus
from pipedec.scheduler.calls import Call

_CHECK_SECONDS = 0.25  # between two calls of ``check`` while no event arrives

_T = TypeVar("_T")
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
        self._waits_seconds = LOOK_SECONDS if check is None else _CHECK_SECONDS
        self._session = Session(
            _Blocking(scheduler), scheduler.keys, scheduler.topology, check or (lambda: None), silence_seconds
        )

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
        most: int | None = None,
    ) -> list[Reply]:
        """Submit all requests at once, or ``most`` at a time, and wait until every answer has ended, in any order. Returns the
        replies in the order of the requests.

        A request that is refused or cancelled has an ``error``; the others continue. An exception in a callback cancels all.

        Args:
            on_text: receives the index of a request and the text of its answer in pieces.
            on_end: receives the index of a request whose answer has ended, or that was refused.

        Raises:
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        with self.cancelling():
            replies: list[Reply] = []
            while len(replies) < len(requests) or self._session.open:
                index = len(replies)
                if index < len(requests) and len(self._session.open) < (most or len(requests)):
                    try:
                        replies.append(self.submit(requests[index], partial(on_text, index)))
                    except UserError as error:  # the queue is full
                        replies.append(Reply(-1, error=error))
                        on_end(index)
                    continue
                for ended in self.read():
                    on_end(next(index for index, reply in enumerate(replies) if reply is ended))
        return replies

    def live(self) -> Iterator[Frame]:
        """The live feed (docs/live.md), until the run ends. Frames of figures come once a second in any case.

        Raises:
            RankLost, SchedulerLost: the run has ended, or stopped answering.
        """
        feed = LiveReading(self._scheduler.run_id)
        while True:
            yield from _result(self._session.live(feed))

    def submit(
        self, request: PromptRequest, on_text: OnText = _ignore, on_threads: OnThreads = _ignore, on_pause: OnPause = _ignore
    ) -> Reply:
        """Submit a request; ``read`` then follows its answer. Raises UserError if the run takes no requests."""
        return _result(self._session.submit(request, _calling(on_text, on_threads, on_pause)))

    def read(self, timeout_seconds: float | None = None) -> list[Reply]:
        """Wait for events of any open answer and handle them. Returns the replies that have ended.

        Args:
            timeout_seconds: wait at most this long; None to wait until the next check is due.

        Raises:
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        timeout = self._waits_seconds if timeout_seconds is None else timeout_seconds
        if not self._session.open:
            time.sleep(timeout)
            return []
        ended = _result(self._session.turn(timeout))
        for reply in ended:
            _result(self._session.close(reply))
        return ended

    def cancel(self, reply: Reply) -> None:
        """End a request; its answer continues until the cluster has ended it."""
        _result(self._session.cancel(reply))

    @property
    def last_status(self) -> RunStatus | None:
        """The state of the run when it was last read; None before the first time."""
        return self._session.status

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
                _result(self._session.give_up(*self._session.open.values()))
            raise
        finally:
            self._session.open.clear()


class _Blocking:
    """The connection of a session that blocks."""

    def __init__(self, scheduler: ClientScheduler) -> None:
        self._scheduler = scheduler

    async def ask(self, call: Call[_T]) -> _T:
        return self._scheduler.ask(call)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)


def _result(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(_T, end.value)
    raise AssertionError("it is suspended")


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
