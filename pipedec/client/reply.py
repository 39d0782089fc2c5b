"""One answer as a client reads it: its events become text, log-probabilities, a trace, and the times of its tokens.

Knows no scheduler: the caller passes the events in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError, RankLost, RequestFailed, UserError
from pipedec.core.stage_message import HiddenStates
from pipedec.messages.events import (
    AbortEvent,
    CacheSlotsEvent,
    CancelledEvent,
    CompletionEvent,
    ErrorEvent,
    Event,
    HiddenStatesEvent,
    LogprobsEvent,
    OverranEvent,
    PausedEvent,
    PromptLogprobsEvent,
    ResumedEvent,
    ThreadNews,
    TokensEvent,
    TraceEvents,
)
from pipedec.tracing import TraceEvent


@dataclass(frozen=True)
class Delta:
    """New parts of an answer.

    Attributes:
        logprobs: of tokens, in order; those of a token come with it or earlier. The last stage may send those of more tokens
            than the answer has.
        threads: news of decode threads, if the request has ``show_threads``.
        is_paused: the answer waits for KV memory, or for the run to recover.
        arrived: when the last part of it arrived, in seconds of ``time.perf_counter``.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    threads: list[ThreadNews] = field(default_factory=list)
    is_paused: bool = False
    arrived: float = field(default_factory=time.perf_counter)

    def __add__(self, later: Delta) -> Delta:
        return Delta(
            self.text + later.text, self.token_ids + later.token_ids, self.logprobs + later.logprobs,
            self.threads + later.threads, later.is_paused, later.arrived,
        )  # fmt: skip


OnDelta = Callable[[Delta], None]


class TokenArrivals:
    """Arrival times of the tokens of one answer at the client, in seconds since the request was submitted.

    Attributes:
        submitted: seconds of ``time.perf_counter``.
        events: for each event with tokens, its time and the number of tokens.
    """

    def __init__(self) -> None:
        self.submitted = time.perf_counter()
        self.events: list[tuple[float, int]] = []

    def note(self, num_tokens: int) -> None:
        if num_tokens:
            self.events.append((time.perf_counter() - self.submitted, num_tokens))

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token; None if none has arrived."""
        return self.events[0][0] if self.events else None

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first; None if there is only one."""
        num_tokens = sum(count for _, count in self.events)
        return (self.events[-1][0] - self.events[0][0]) / (num_tokens - 1) if num_tokens > 1 else None


@dataclass
class Reply:
    """One answer.

    Attributes:
        number: of the request.
        on_delta: receives the delta of every event.
        completion: the answer; None until it is complete.
        error: why it was refused, or that it was cancelled before it began; else None.
        trace: of a traced answer.
        hidden_states: of the prompt's tokens, if requested.
        cache_slots: of a traced answer, the capacity of each stage's KV cache in rows.
        operation: the id with which its request was submitted.
        overran: timesteps in which a rank took longer than its emulated time.
        waits: for KV memory, at the beginning or after a pause.
        heard: when the last event arrived, or the request was last known to wait, in seconds of ``time.monotonic``.
    """

    number: int
    on_delta: OnDelta = lambda delta: None
    completion: Completion | None = None
    error: PipedecError | None = None
    operation: str = ""
    trace: list[TraceEvent] = field(default_factory=list)
    hidden_states: HiddenStates = HiddenStates("", ())
    cache_slots: dict[int, int] = field(default_factory=dict)
    overran: set[int] = field(default_factory=set)
    arrivals: TokenArrivals = field(default_factory=TokenArrivals)
    heard: float = field(default_factory=time.monotonic)
    position: str = "0"
    waits: bool = False
    _run_recovers: bool = False
    _epochs: set[int] = field(default_factory=set)  # epochs in which the answer continued
    _known: tuple[int, int] = (0, 0)  # tokens and characters
    _threads: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)  # the same of each decode thread
    _logprobs: dict[int, dict[int, float]] = field(default_factory=dict)  # by ordinal
    _prompt_logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def is_paused(self) -> bool:
        """Whether it waits for KV memory, or the run has lost ranks, or Redis, and recovers."""
        return self.waits or self._run_recovers

    @property
    def has_ended(self) -> bool:
        return self.completion is not None or self.error is not None

    def completed(self) -> Completion:
        """The completion of an answer that has ended. Raises UserError or RequestFailed if there is none."""
        if self.completion is None:
            raise self.error or PipedecError("the answer is not complete")
        return self.completion

    def take(self, position: str, event: Event) -> None:
        """Handle the event at ``position`` of the answer. Raises RankLost if the run has failed."""
        self.position, self.heard = position, time.monotonic()
        self._run_recovers = False  # ranks serve
        match event:
            case TokensEvent():
                self._take_tokens(event)
            case PausedEvent():
                self.waits = True
                self._report()
            case ResumedEvent(epoch):
                self.waits = False
                self._epochs |= set() if epoch is None else {epoch}
                self._report()
            case TraceEvents(tasks):
                self.trace += tasks
            case CacheSlotsEvent(rank, slots):
                self.cache_slots[rank] = slots
            case OverranEvent(timesteps):
                self.overran.update(timesteps)
            case LogprobsEvent(logprobs, index):
                rows = {ordinal: dict(pairs) for ordinal, pairs in enumerate(logprobs, start=index)}
                new = [row for ordinal, row in rows.items() if ordinal not in self._logprobs]
                self._logprobs |= rows
                self._report(logprobs=new)
            case PromptLogprobsEvent(logprobs, index):
                self._prompt_logprobs[index : index + len(logprobs)] = map(dict, logprobs)
            case HiddenStatesEvent(HiddenStates(dtype, rows), index):
                self.hidden_states = HiddenStates(dtype, self.hidden_states.rows[:index] + rows)
            case CompletionEvent():
                self.completion = self._completed(event)
            case CancelledEvent():
                self.error = UserError("the request was cancelled before it began")
            case AbortEvent(text):
                raise RankLost(text)
            case ErrorEvent(message, is_fault):
                self.error = RequestFailed(message) if is_fault else UserError(message)

    def run_recovers(self, recovers: bool) -> None:
        """Record the state of the run: whether it has lost ranks, or Redis, and will continue."""
        if recovers != self._run_recovers and not self.has_ended:
            self._run_recovers = recovers
            self._report()

    def _take_tokens(self, event: TokensEvent) -> None:
        """Report new tokens: after a recovery an answer may repeat earlier ones."""
        tokens, characters = self._known
        token_ids, text = event.token_ids[max(tokens - event.index, 0) :], event.text[max(characters - event.offset, 0) :]
        self._known = tokens + len(token_ids), characters + len(text)
        self.arrivals.note(len(token_ids))
        self._report(text, token_ids, threads=[new for news in event.threads or [] if (new := self._new_of(news)) is not None])

    def _new_of(self, news: ThreadNews) -> ThreadNews | None:
        """The new part of a thread; None if there is none."""
        tokens, characters = self._threads.get(news.path, (-1, 0))
        if news.tokens < tokens:
            return None
        text = news.text[max(characters - news.offset, 0) :]
        self._threads[news.path] = news.tokens, max(characters, news.offset) + len(text)
        return replace(news, text=text, offset=characters)

    def _report(self, text: str = "", token_ids: Sequence[int] = (), **news: Any) -> None:
        self.on_delta(Delta(text, list(token_ids), is_paused=self.is_paused, **news))

    def _completed(self, event: CompletionEvent) -> Completion:
        """The completion, with its times, and with the log-probabilities of its own tokens (the last stage may have sent more);
        those of tokens that the request contained are empty.
        """
        completion, metrics = event.completion, event.completion.metrics
        metrics.recoveries = len(self._epochs)
        metrics.ttft_seconds = self.arrivals.ttft_seconds
        metrics.tpot_seconds = self.arrivals.tpot_seconds
        metrics.e2e_seconds = time.perf_counter() - self.arrivals.submitted
        if metrics.ttft_seconds is not None:
            metrics.queue_seconds = max(0.0, metrics.ttft_seconds - metrics.prefill_seconds)
        if completion.prompt_logprobs is not None:
            completion.prompt_logprobs += self._prompt_logprobs
        if self._logprobs and event.sampled is not None:
            tokens = zip(event.sampled, completion.token_ids, strict=True)
            completion.logprobs = [{token: 0.0} if which < 0 else self._logprobs[which] for which, token in tokens]
        elif self._logprobs:
            completion.logprobs = [self._logprobs.get(ordinal, {}) for ordinal in range(len(completion.token_ids))]
        return completion
