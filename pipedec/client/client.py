"""The client's side of a request: submit it, read the answer while it is generated, cancel it. Needs no torch and no
checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from pipedec.core import Completion, PipedecError, RankLost, UserError
from pipedec.messages import (
    AbortEvent,
    CacheSlotsEvent,
    CancelledEvent,
    CompletionEvent,
    ErrorEvent,
    Event,
    LogprobsEvent,
    OverranEvent,
    PromptRequest,
    ThreadNews,
    TokensEvent,
    TraceEvents,
    load_validators,
)
from pipedec.scheduler.protocol import Scheduler
from pipedec.topology import rank_name
from pipedec.tracing import TraceEvent

_POLL_SECONDS = 0.25

OnText = Callable[[str], None]
OnThreads = Callable[[list[ThreadNews]], None]


class TokenArrivals:
    """When the tokens of one answer arrive at the client, counted from submitting the request."""

    def __init__(self) -> None:
        self._submitted = time.perf_counter()
        self._first: float | None = None
        self._last = self._submitted

    def note(self, num_tokens: int) -> None:
        """``num_tokens`` tokens arrive now."""
        if num_tokens:
            self._last = time.perf_counter()
            self._first = self._first or self._last

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token; None if none has arrived."""
        return None if self._first is None else self._first - self._submitted

    def tpot_seconds(self, num_tokens: int) -> float | None:
        """Time per output token after the first, of an answer of ``num_tokens``; None if there is only one."""
        return None if self._first is None or num_tokens < 2 else (self._last - self._first) / (num_tokens - 1)


class Client:
    """Sends requests to a running cluster.

    Args:
        check: called while waiting; raises if the cluster is known to be in trouble (``LocalCluster.check``).
        silence_seconds: how long to wait for the next event before the cluster counts as lost.
    """

    def __init__(self, scheduler: Scheduler, check: Callable[[], None] = lambda: None, silence_seconds: float = 600.0) -> None:
        self._scheduler = scheduler
        self._check = check
        self._silence_seconds = silence_seconds
        self.trace: list[TraceEvent] = []
        self._logprobs: list[dict[int, float]] = []
        self._arrivals = TokenArrivals()
        self.cache_slots: dict[int, int] = {}  # of the last answer if it was traced: capacity of each stage's KV cache in rows
        self.overran: set[int] = set()  # timesteps of the last answer in which a rank took longer than its emulated time
        load_validators()  # not while the first token is on its way

    def ask(
        self, request: PromptRequest, on_text: OnText = lambda text: None, on_threads: OnThreads = lambda news: None
    ) -> Completion:
        """Submit a request and wait for its completion.

        Ctrl-C, or any other exception in a callback, cancels the request and is raised again; the cluster goes on with the next
        request.

        Args:
            on_text: receives the text in pieces.
            on_threads: receives the news of decode threads if the request has ``show_threads``.

        Raises:
            UserError: the cluster refused the request.
            RankLost, SchedulerLost: the cluster died or stopped answering.
        """
        self.trace, self.cache_slots, self.overran, self._logprobs = [], {}, set(), []
        self._arrivals = TokenArrivals()
        number = self._scheduler.submit(request.to_json())
        try:
            completion = self._read(number, on_text, on_threads)
        except UserError:
            self._scheduler.close_answer(number)
            raise
        except BaseException:
            with suppress(PipedecError):
                self._scheduler.cancel(number)
            raise
        self._scheduler.close_answer(number)
        return completion

    def is_up(self) -> bool:
        """Whether the run takes requests."""
        return self._scheduler.status().state == "up"

    def _read(self, number: int, on_text: OnText, on_threads: OnThreads) -> Completion:
        position = "0"
        deadline = time.monotonic() + self._silence_seconds
        while time.monotonic() < deadline:
            events = self._scheduler.read_answer(number, position, _POLL_SECONDS)
            for position, event in events:  # noqa: B007 - the position goes on into the next read
                if (completion := self._take(event, on_text, on_threads)) is not None:
                    return completion
            if events or self._waits_in_line(number):
                deadline = time.monotonic() + self._silence_seconds
        raise RankLost(f"no event has arrived for {self._silence_seconds:.0f} s; see pipedec status")

    def _waits_in_line(self, number: int) -> bool:
        """Whether another request is being answered. Raises if the cluster has failed or ended."""
        self._check()
        if failure := self._scheduler.failure():
            raise RankLost(failure)
        if lost := self._scheduler.expired_ranks():
            raise RankLost(f"{', '.join(map(rank_name, lost))} stopped answering")
        status = self._scheduler.status()
        if status.state == "gone":
            raise RankLost("the cluster was stopped before it answered")
        return status.running not in (None, number)

    def _completed(self, event: CompletionEvent) -> Completion:
        """The completion, with the log-probabilities of its tokens (the last stage may have sent those of further tokens)."""
        completion = event.completion
        completion.metrics.ttft_seconds = self._arrivals.ttft_seconds
        completion.metrics.tpot_seconds = self._arrivals.tpot_seconds(len(completion.token_ids))
        if self._logprobs and event.sampled is not None:
            tokens = zip(event.sampled, completion.token_ids, strict=True)
            completion.logprobs = [{token: 0.0} if which < 0 else self._logprobs[which] for which, token in tokens]
        else:
            completion.logprobs = self._logprobs[: len(completion.token_ids)] or None
        return completion

    def _take(self, event: Event, on_text: OnText, on_threads: OnThreads) -> Completion | None:
        """Handle one event. Returns the completion if it was the last event."""
        match event:
            case TokensEvent(token_ids, text, threads):
                self._arrivals.note(len(token_ids))
                on_text(text)
                on_threads(threads or [])
            case TraceEvents(rows):
                self.trace += [TraceEvent(*row) for row in rows]
            case CacheSlotsEvent(rank, slots):
                self.cache_slots[rank] = slots
            case OverranEvent(timesteps):
                self.overran.update(timesteps)
            case LogprobsEvent(logprobs):
                self._logprobs += map(dict, logprobs)
            case CompletionEvent():
                return self._completed(event)
            case CancelledEvent():
                raise UserError("the request was cancelled before it began")
            case AbortEvent(text):
                self._check()  # the supervisor knows better than the other ranks what happened to a process
                raise RankLost(text)
            case ErrorEvent(message):
                raise UserError(message)
        return None
