"""Publishes the events that clients read: tokens as they are accepted, pauses, traces, and the completion.

Finds where answers end at a stop string, since only rank 0 knows text. Knows no method and no row.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipedec.core import RequestUpdate, TokenLogprobs, Verdict
from pipedec.engine.answer import RunningAnswer
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.engine.records import Interrupted, PromptScored, Record, RequestClosed, RequestEnded, RequestOpened, Waits
from pipedec.engine.request_queue import RequestQueue
from pipedec.messages import CompletionEvent, ErrorEvent, PausedEvent, PromptLogprobsEvent, ResumedEvent, TraceEvents, TraceRow
from pipedec.tracing import SCHEDULER_TRACK


@dataclass(slots=True)
class _OpenRequest:
    """A request and its client.

    Attributes:
        goes_on: it was running in an epoch that has ended, and has not been opened since.
        began_us: on the scheduler's clock, if it is traced.
        waits: the client has been informed that the request waits.
        num_scored: tokens of the prompt whose log-probabilities were published.
        completion: the last event, until the other ranks have closed the request's lane.
    """

    answer: RunningAnswer
    goes_on: bool
    began_us: int
    waits: bool = False
    num_scored: int = 0
    completion: CompletionEvent | ErrorEvent | None = None


class Publisher:
    """Adds accepted tokens to answers, and is the listener that publishes the rest.

    Other ranks publish traces, and timesteps that overran, when they close the request's lane. So the completion of a request
    that is traced or emulated, the last event that its client reads, is published after theirs.

    Attributes:
        tasks: those of rank 0 in the present epoch.
    """

    def __init__(self, queue: RequestQueue, wiring: Wiring, tasks: RankTasks) -> None:
        self.tasks = tasks
        self._queue = queue
        self._scheduler = wiring.scheduler
        self._is_emulated = wiring.emulation is not None
        self._asked: dict[int, _OpenRequest] = {}

    def begin(self, answer: RunningAnswer, goes_on: bool) -> None:
        """Begin a request; ``goes_on`` if it was running in an epoch that has ended."""
        began_us = self._scheduler.clock_us() if answer.request.trace else 0
        self._asked[answer.request.number] = _OpenRequest(answer, goes_on, began_us)

    def text(self, number: int) -> str:
        """The text of a running request so far."""
        return self._asked[number].answer.completion.text

    def take(self, result: RequestUpdate) -> Verdict:
        """Publish accepted tokens; returns the verdict as far as the answer goes."""
        assert result.verdict is not None
        return self._advance(self._asked[result.number].answer, result.verdict, result.logprobs)

    def _advance(self, answer: RunningAnswer, verdict: Verdict, logprobs: TokenLogprobs = ()) -> Verdict:
        verdict, events = answer.take(verdict, logprobs)
        self._queue.put(answer.request.number, *events)
        return verdict

    def note(self, record: Record) -> None:
        match record:
            case Waits():
                self._asked[record.number].waits = True
                self._queue.put(record.number, PausedEvent())
            case Interrupted():
                self._asked[record.number].goes_on = True
            case RequestOpened():
                self._opened(record.number, self._asked[record.number])
            case PromptScored():
                asked = self._asked[record.number]
                self._queue.put(record.number, PromptLogprobsEvent(list(map(list, record.logprobs)), asked.num_scored))
                asked.num_scored += len(record.logprobs)
            case RequestEnded():
                self._ended(record, self._asked[record.number])
            case RequestClosed():
                self._closed(record.number, self._asked.pop(record.number))

    def _opened(self, number: int, asked: _OpenRequest) -> None:
        asked.answer.opened()
        self.tasks.opened(number, asked.answer.request.trace)
        if asked.waits or asked.goes_on:
            self._queue.put(number, ResumedEvent(self._scheduler.epoch if asked.goes_on else None))
            asked.waits = asked.goes_on = False

    def _ended(self, ended: RequestEnded, asked: _OpenRequest) -> None:
        asked.completion = self._completed(ended, asked.answer)
        if not (asked.answer.request.trace or self._is_emulated):
            self._queue.finish(ended.number, asked.completion)
            asked.completion = None

    def _completed(self, ended: RequestEnded, answer: RunningAnswer) -> CompletionEvent | ErrorEvent:
        if ended.bad_stage is not None:
            return ErrorEvent(
                f"stage {ended.bad_stage} computed NaN or infinity for this request, which has failed: check that stage's "
                "weights and device, or use a dtype of a wider range"
            )
        if not answer.is_complete:  # cancelled, so that no verdict has ended it
            self._advance(answer, Verdict((), ended.reason))
        return answer.completed()

    def _closed(self, number: int, asked: _OpenRequest) -> None:
        if asked.completion is not None:
            traces = self._scheduler_trace(asked.began_us) if asked.answer.request.trace else []
            self._queue.finish(number, *traces, *self.tasks.closed(number), asked.completion)

    def _scheduler_trace(self, began_us: int) -> list[TraceEvents]:
        rows: list[TraceRow] = [
            (SCHEDULER_TRACK, granted.task.label, granted.task.kind, granted.granted_us, granted.finished_us)
            for granted in self._scheduler.trace()
            if granted.finished_us >= began_us
        ]
        return [TraceEvents(rows)]
