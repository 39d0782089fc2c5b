"""The output of requests: tokens to text, stop strings, and the events that clients read.

Only rank 0 knows text. ``Answer`` finds where the text ends an answer; ``Publisher`` is a listener that publishes what has
happened. Nothing is published twice, except that a rank 0 which takes over an answer from another process publishes its text once
more: the client drops what it already has.
"""

from __future__ import annotations

from typing import Protocol

from pipedec.core.completion import Completion
from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import HiddenStates, TokenLogprobs
from pipedec.core.verdict import Verdict
from pipedec.decoding import Request
from pipedec.decoding.events import Advanced, Interrupted, PromptScored, Record, RequestClosed, RequestEnded, RequestOpened, Waits
from pipedec.engine.rank_tasks import RankTasks, Report, Wiring
from pipedec.messages.events import (
    CompletionEvent,
    ErrorEvent,
    Event,
    HiddenStatesEvent,
    LogprobsEvent,
    PausedEvent,
    PromptLogprobsEvent,
    ResumedEvent,
    TokensEvent,
    TraceEvents,
)
from pipedec.text.prompt import Prompter
from pipedec.tracing import SCHEDULER_TRACK, TraceEvent


class Answer:
    """The answer of a request in one thread.

    Args:
        num_brought: earlier tokens of the answer that the request contained.
        ended: why the answer ended with ``asked.output_token_ids``; None if they do not end it.

    Attributes:
        completion: as far as the answer goes.
        began_us: when it began, in microseconds of the scheduler's clock, if it is traced.
        resumes: the event that its client reads when the request gets a lane; None if the client knows of no wait.
        report: of rank 0's work for it, if it is traced or emulated, from the opening of its lane on.
        last: the last event; None while it goes on.
    """

    def __init__(
        self, asked: TokenizedRequest, prompter: Prompter, num_stages: int, num_brought: int = 0, ended: str | None = None
    ) -> None:
        self.completion = Completion(asked.method, num_stages, len(asked.prompt_token_ids), seed=asked.sampling.seed)
        self.completion.metrics.resumed_tokens = len(asked.output_token_ids)
        self.completion.prompt_logprobs = None if asked.sampling.prompt_logprobs is None else [None]  # the client adds the rest
        self.asked = asked
        self.began_us = 0
        self.resumes: ResumedEvent | None = None
        self.report: Report | None = None
        self.last: CompletionEvent | ErrorEvent | None = None
        self._text = prompter.answer_text(asked.sampling)
        earlier = asked.output_token_ids[: asked.sampling.max_tokens]
        brought, known = earlier[:num_brought], earlier[num_brought:]
        self._read(Verdict.of(*brought, finished=None if known else ended))
        self._brought = len(self.completion.token_ids), len(self.completion.text)
        if known and not self.is_complete:
            self._read(Verdict.of(*known, finished=ended))
        self._published = len(self.completion.token_ids), self._brought[1]  # tokens and characters

    @property
    def is_complete(self) -> bool:
        return self.completion.finish_reason is not None

    def cut(self, verdict: Verdict) -> Verdict:
        """Read the accepted tokens. Returns the verdict, cut where a stop string ends the answer."""
        return self._read(verdict)

    def _read(self, verdict: Verdict) -> Verdict:
        last = len(verdict.tokens) - 1 if verdict.finished == "stop" else None  # the end token
        pieces = [(token, self._text.piece(token, index == last)) for index, token in enumerate(verdict.tokens)]
        text, count = self._text.add_pieces(pieces)
        if count is not None:
            verdict = Verdict.of(*verdict.tokens[:count], finished="stop")
        elif verdict.finished is not None:
            text += self._text.finish()
        self.completion.token_ids += verdict.tokens
        self.completion.text += text
        self.completion.finish_reason, self.completion.stop_reason = verdict.finished, self._text.stop_reason
        return verdict

    def lane_opened(self) -> None:
        """The request begins, or continues after a pause: in one thread after its last token."""

    def news(self, logprobs: TokenLogprobs = ()) -> list[Event]:
        """The tokens and text that the client has not received yet, and the log-probabilities of the last verdict's tokens."""
        (tokens, characters), completion = self._published, self.completion
        self._published = len(completion.token_ids), len(completion.text)
        scored: list[Event] = [LogprobsEvent(list(map(list, logprobs)), tokens)] if logprobs else []
        index, offset = tokens - self._brought[0], characters - self._brought[1]
        return [*scored, TokensEvent(completion.token_ids[tokens:], completion.text[characters:], None, index, offset)]

    def completed(self) -> CompletionEvent:
        """The last event for the client."""
        return CompletionEvent(self.completion)


class Posts(Protocol):
    """Publishes events of requests soon, in the order of the calls for each request."""

    def put(self, number: int, *events: Event) -> None: ...

    def finish(self, number: int, *events: Event) -> None:
        """Publish the last events of a request."""


class Publisher:
    """The listener that publishes the events of answers. The ``text`` of every request is its ``Answer``.

    Other ranks publish traces, and timesteps that overran, when they close the request's lane. So the completion of a request
    that is traced or emulated, the last event that its client reads, is published after theirs.
    """

    def __init__(self, posts: Posts, wiring: Wiring, tasks: RankTasks) -> None:
        self.tasks = tasks  # those of rank 0 in the present epoch
        self._posts = posts
        self._scheduler = wiring.scheduler
        self._is_emulated = wiring.pacer is not None

    def begin(self, answer: Answer, goes_on: bool) -> None:
        """Begin an answer; ``goes_on`` if it was running in an epoch that has ended."""
        answer.began_us = self._scheduler.clock_us() if answer.asked.trace else 0
        answer.resumes = ResumedEvent(self._scheduler.epoch) if goes_on else None

    def on_record(self, record: Record) -> None:
        match record:
            case Waits(request):
                answer = answer_of(request)
                answer.resumes = answer.resumes or ResumedEvent()
                self._posts.put(request.number, PausedEvent())
            case Interrupted(request):
                answer = answer_of(request)
                answer.resumes, answer.report = ResumedEvent(self._scheduler.epoch), None
            case RequestOpened(request):
                answer = answer_of(request)
                answer.lane_opened()
                answer.report = answer.report or self.tasks.begin_report(request.asked.trace)
                if answer.resumes is not None:
                    self._posts.put(request.number, answer.resumes)
                    answer.resumes = None
            case Advanced(request):
                self._posts.put(request.number, *answer_of(request).news(record.logprobs))
            case PromptScored(request, first, logprobs, None):
                self._posts.put(request.number, PromptLogprobsEvent(list(map(list, logprobs)), first))
            case PromptScored(request, first, _, HiddenStates() as hidden_states):
                self._posts.put(request.number, HiddenStatesEvent(hidden_states, first))
            case RequestEnded(request):
                answer = answer_of(request)
                answer.last = self._last_event(record, answer)
                if not (request.asked.trace or self._is_emulated):
                    self._posts.finish(request.number, answer.last)
            case RequestClosed(request):
                answer = answer_of(request)
                if answer.last is not None and (request.asked.trace or self._is_emulated):
                    traces = [TraceEvents(self._scheduler_events(answer.began_us))] if request.asked.trace else []
                    reported = [] if answer.report is None else self.tasks.end_report(answer.report)
                    self._posts.finish(request.number, *traces, *reported, answer.last)

    def _last_event(self, ended: RequestEnded, answer: Answer) -> CompletionEvent | ErrorEvent:
        if ended.failure is not None:
            return ErrorEvent(ended.failure, is_fault=True)
        if not answer.is_complete:  # cancelled, so that no verdict has ended it
            answer.cut(Verdict((), ended.reason))
            self._posts.put(ended.request.number, *answer.news())
        return answer.completed()

    def _scheduler_events(self, began_us: int) -> list[TraceEvent]:
        since = [granted for granted in self._scheduler.trace() if granted.finished_us >= began_us]
        return [TraceEvent(SCHEDULER_TRACK, one.task.label, one.task.kind, one.granted_us, one.finished_us) for one in since]


def answer_of(request: Request) -> Answer:
    assert isinstance(request.text, Answer)
    return request.text
