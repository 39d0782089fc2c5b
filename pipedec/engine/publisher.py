"""Publishes the events that clients read: tokens as they are accepted, pauses, traces, and the completion.

Finds where answers end at a stop string, since only rank 0 knows text. Knows no method and no row.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipedec.core.stage_message import RequestUpdate
from pipedec.core.verdict import Verdict
from pipedec.engine.answer import RunningAnswer
from pipedec.engine.loop import Interrupted, PromptScored, Record, RequestClosed, RequestEnded, RequestOpened, Waits
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.engine.request_queue import RequestQueue
from pipedec.messages.events import CompletionEvent, ErrorEvent, PausedEvent, PromptLogprobsEvent, ResumedEvent, TraceEvents
from pipedec.tracing import SCHEDULER_TRACK, TraceEvent


@dataclass(slots=True)
class _OpenRequest:
    """A request and its client."""

    answer: RunningAnswer
    goes_on: bool  # it was running in an epoch that has ended, and has not been opened since
    began_us: int  # on the scheduler's clock, if it is traced
    waits: bool = False  # the client knows that the request waits
    num_scored: int = 0  # tokens of the prompt whose log-probabilities were published
    completion: CompletionEvent | ErrorEvent | None = None  # the last event, until the other ranks have closed the request's lane


class Publisher:
    """Adds accepted tokens to answers, and is the listener that publishes the rest.

    Other ranks publish traces, and timesteps that overran, when they close the request's lane. So the completion of a request
    that is traced or emulated, the last event that its client reads, is published after theirs.
    """

    def __init__(self, queue: RequestQueue, wiring: Wiring, tasks: RankTasks) -> None:
        self.tasks = tasks  # those of rank 0 in the present epoch
        self._queue = queue
        self._scheduler = wiring.scheduler
        self._is_emulated = wiring.emulation is not None
        self._open: dict[int, _OpenRequest] = {}

    def begin(self, answer: RunningAnswer, goes_on: bool) -> None:
        """Begin a request; ``goes_on`` if it was running in an epoch that has ended."""
        began_us = self._scheduler.clock_us() if answer.request.trace else 0
        self._open[answer.request.number] = _OpenRequest(answer, goes_on, began_us)

    def forget(self, number: int) -> None:
        """Forget a request that has not begun after all."""
        self._open.pop(number, None)

    def text(self, number: int) -> str:
        """The text of a running request so far."""
        return self._open[number].answer.completion.text

    def take(self, result: RequestUpdate) -> Verdict:
        """Publish accepted tokens; returns the verdict, cut at a stop string."""
        assert result.verdict is not None
        verdict, events = self._open[result.number].answer.take(result.verdict, result.logprobs)
        self._queue.put(result.number, *events)
        return verdict

    def note(self, record: Record) -> None:
        match record:
            case Waits(number):
                self._open[number].waits = True
                self._queue.put(number, PausedEvent())
            case Interrupted(number):
                self._open[number].goes_on = True
            case RequestOpened(number):
                one = self._open[number]
                one.answer.opened()
                self.tasks.opened(number, one.answer.request.trace)
                if one.waits or one.goes_on:
                    self._queue.put(number, ResumedEvent(self._scheduler.epoch if one.goes_on else None))
                    one.waits = one.goes_on = False
            case PromptScored(number, logprobs):
                one = self._open[number]
                self._queue.put(number, PromptLogprobsEvent(list(map(list, logprobs)), one.num_scored))
                one.num_scored += len(logprobs)
            case RequestEnded(number):
                one = self._open[number]
                completion = self._completion(record, one.answer)
                if one.answer.request.trace or self._is_emulated:
                    one.completion = completion
                else:
                    self._queue.finish(number, completion)
            case RequestClosed(number):
                one = self._open.pop(number)
                if one.completion is not None:
                    traces = [TraceEvents(self._scheduler_events(one.began_us))] if one.answer.request.trace else []
                    self._queue.finish(number, *traces, *self.tasks.closed(number), one.completion)

    def _completion(self, ended: RequestEnded, answer: RunningAnswer) -> CompletionEvent | ErrorEvent:
        if ended.failure is not None:
            return ErrorEvent(ended.failure, is_fault=True)
        if not answer.is_complete:  # cancelled, so that no verdict has ended it
            self._queue.put(ended.number, *answer.take(Verdict((), ended.reason))[1])
        return answer.completed()

    def _scheduler_events(self, began_us: int) -> list[TraceEvent]:
        since = [granted for granted in self._scheduler.trace() if granted.finished_us >= began_us]
        return [TraceEvent(SCHEDULER_TRACK, one.task.label, one.task.kind, one.granted_us, one.finished_us) for one in since]
