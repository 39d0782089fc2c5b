"""The client's side of requests: submit them, read all answers together while they are generated, cancel them. Needs no torch
and no checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from pipedec.client.reply import OnPause, OnText, OnThreads, Reply
from pipedec.core import Completion, PipedecError, RankLost, UserError
from pipedec.messages import AbortEvent, PromptRequest, load_validators
from pipedec.scheduler.protocol import Scheduler
from pipedec.topology import rank_name

_POLL_SECONDS = 0.25
_CHECK_SECONDS = 2.0  # while events arrive, between two looks at the state of the run


class Client:
    """Sends requests to a running cluster. Used from one thread.

    Args:
        check: called while waiting; raises if the cluster is known to be in trouble (``LocalCluster.check``).
        silence_seconds: how long to wait for the next event of an answer before the cluster counts as lost.
    """

    def __init__(self, scheduler: Scheduler, check: Callable[[], None] = lambda: None, silence_seconds: float = 600.0) -> None:
        self._scheduler = scheduler
        self._check = check
        self._silence_seconds = silence_seconds
        self._open: dict[int, Reply] = {}
        self._checked = 0.0
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
        reply = Reply(number, on_text, on_threads, on_pause, arrivals=arrivals)
        self._open[reply.number] = reply
        return reply

    def read(self, timeout_seconds: float = _POLL_SECONDS) -> list[Reply]:
        """Wait for events of any open answer, at most this long, and handle them.

        Returns:
            the replies that have ended.

        Raises:
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        if not self._open:
            time.sleep(timeout_seconds)
            return []
        events = self._scheduler.read_answers({number: reply.position for number, reply in self._open.items()}, timeout_seconds)
        for number, position, event in events:
            if isinstance(event, AbortEvent):
                self._check()  # the supervisor knows better than the other ranks what happened to a process
            self._open[number].take(position, event)
        if not events or time.monotonic() > self._checked + _CHECK_SECONDS:
            self._check_run()
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

    def _check_run(self) -> None:
        """Raises RankLost if the cluster has failed or ended, or an answer has been silent for too long without waiting."""
        self._check()
        if failure := self._scheduler.failure():
            raise RankLost(failure)
        if lost := self._scheduler.expired_ranks():
            raise RankLost(f"{', '.join(map(rank_name, lost))} stopped answering")
        status = self._scheduler.status()
        if status.state == "gone":
            raise RankLost("the cluster was stopped before it answered")
        self._checked = time.monotonic()
        for reply in self._open.values():
            if reply.is_paused or (status.running and reply.number not in status.running):
                reply.heard = self._checked  # it waits while others are answered
            elif self._checked > reply.heard + self._silence_seconds and not reply.has_ended:
                raise RankLost(f"no event has arrived for {self._silence_seconds:.0f} s; see pipedec status")
