"""The client's side of requests: submit them, read all answers together while they are generated, cancel them. Needs no torch
and no checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from pipedec.client.reply import Delta, OnDelta, Reply
from pipedec.client.watch import LOOK_SECONDS, SILENCE_SECONDS, check_run, check_silence
from pipedec.core import Completion, PipedecError, UserError
from pipedec.messages import AbortEvent, PromptRequest, ThreadNews, load_validators
from pipedec.scheduler.protocol import Scheduler

_CHECK_SECONDS = 0.25  # between two calls of ``check`` while nothing arrives

OnText = Callable[[str], None]
OnThreads = Callable[[list[ThreadNews]], None]
OnPause = Callable[[bool], None]  # whether the answer is paused from now on


class Client:
    """Sends requests to a running cluster. Used from one thread.

    Args:
        check: called while waiting; raises if the cluster is known to be in trouble (``LocalCluster.check``). None if nothing is
            known of it but what Redis tells every two seconds.
        silence_seconds: how long to wait for the next event of an answer before the cluster counts as lost.
    """

    def __init__(
        self, scheduler: Scheduler, check: Callable[[], None] | None = None, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self._scheduler = scheduler
        self._check = check or (lambda: None)
        self._waits_seconds = LOOK_SECONDS if check is None else _CHECK_SECONDS
        self._silence_seconds = silence_seconds
        self._open: dict[int, Reply] = {}
        self._looked = 0.0
        load_validators()  # not while the first token is on its way

    def ask(
        self,
        request: PromptRequest,
        on_text: OnText = lambda text: None,
        on_threads: OnThreads = lambda news: None,
        on_pause: OnPause = lambda is_paused: None,
    ) -> Completion:
        """Submit a request and wait for its completion. Of an answer that it resumes, callbacks receive what is new.

        Ctrl-C, or any other exception in a callback, cancels the request and is raised again; the cluster goes on with others.

        Args:
            on_text: receives the text in pieces.
            on_threads: receives the news of decode threads if the request has ``show_threads``.
            on_pause: receives True when the answer is paused because KV memory is short, False when it goes on.

        Raises:
            UserError: the cluster refused the request.
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        return self.follow(request, on_text, on_threads, on_pause).completed()

    def follow(
        self,
        request: PromptRequest,
        on_text: OnText = lambda text: None,
        on_threads: OnThreads = lambda news: None,
        on_pause: OnPause = lambda is_paused: None,
    ) -> Reply:
        """As ``ask``, but returns all that was received; a refusal is the reply's ``error``."""
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
        """Submit all requests at once and wait until every answer has ended, in whatever order.

        A request that is refused or cancelled has an ``error``; the others go on. An exception in a callback cancels all.

        Args:
            on_text: receives the index of a request and the text of its answer in pieces.
            on_end: receives the index of a request whose answer has ended, or that was refused.

        Returns:
            the replies in the order of the requests.

        Raises:
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        with self.cancelling():
            replies = [self._submit_or_refuse(request, index, on_text) for index, request in enumerate(requests)]
            indices = {reply.number: index for index, reply in enumerate(replies) if not reply.has_ended}
            for index in set(range(len(requests))) - set(indices.values()):
                on_end(index)
            while self._open:
                for reply in self.read():
                    on_end(indices[reply.number])
        return replies

    def submit(
        self,
        request: PromptRequest,
        on_text: OnText = lambda text: None,
        on_threads: OnThreads = lambda news: None,
        on_pause: OnPause = lambda is_paused: None,
    ) -> Reply:
        """Submit a request; ``read`` then follows its answer. Raises UserError if the run takes no requests."""
        arrivals = Reply(-1).arrivals  # the clock runs before the request is on its way
        number = self._scheduler.submit(request.to_json(), request.priority)
        reply = Reply(number, _calling(on_text, on_threads, on_pause), arrivals=arrivals)
        self._open[reply.number] = reply
        return reply

    def read(self, timeout_seconds: float | None = None) -> list[Reply]:
        """Wait for events of any open answer and handle them.

        Args:
            timeout_seconds: wait at most this long; None for as long as nothing else is to be done.

        Returns:
            the replies that have ended.

        Raises:
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        timeout = self._waits_seconds if timeout_seconds is None else timeout_seconds
        if not self._open:
            time.sleep(timeout)
            return []
        events = self._scheduler.read_answers({number: reply.position for number, reply in self._open.items()}, timeout)
        for number, position, event in events:
            if isinstance(event, AbortEvent):
                self._check()  # the supervisor knows better than the other ranks what happened to a process
            self._open[number].take(position, event)
        if not events:
            self._check()
        if time.monotonic() > self._looked + LOOK_SECONDS:
            self._look()
        return self._take_ended()

    def cancel(self, reply: Reply) -> None:
        """End a request; its answer goes on until the cluster has ended it."""
        self._scheduler.cancel(reply.number)

    def is_up(self) -> bool:
        """Whether the run takes requests."""
        return self._scheduler.status().state == "up"

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """Whatever ends the body cancels the answers that are still open, and forgets them."""
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

    def _submit_or_refuse(self, request: PromptRequest, index: int, on_text: Callable[[int, str], None]) -> Reply:
        try:
            return self.submit(request, lambda text: on_text(index, text))
        except UserError as error:  # the queue is full
            return Reply(-1, error=error)

    def _take_ended(self) -> list[Reply]:
        ended = [reply for reply in self._open.values() if reply.has_ended]
        for reply in ended:
            del self._open[reply.number]
            self._scheduler.close_answer(reply.number)
        return ended

    def _look(self) -> None:
        """Raises RankLost if the cluster has failed or ended, or an answer has been silent for too long without waiting."""
        self._check()
        status = self._scheduler.status()
        self._looked = time.monotonic()
        check_run(status)
        check_silence(status, self._open.values(), self._silence_seconds)


def _calling(on_text: OnText, on_threads: OnThreads, on_pause: OnPause) -> OnDelta:
    """Hand what is new of an answer to those that it concerns."""
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
