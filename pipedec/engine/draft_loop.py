"""Rank 0: takes requests from the queue, decodes them one after another, and streams the answers to their clients.

Decides nothing about rows: the decoding method of the request does. How rows reach the stages is the driver's business.
"""

from __future__ import annotations

from functools import partial

from pipedec.core import SchedulerLost, UserError, Verdict
from pipedec.decoding import Drafter, Method
from pipedec.engine.admission import Admission
from pipedec.engine.answer import Answer
from pipedec.engine.loop import decode
from pipedec.engine.rank_tasks import POLL_SECONDS, RankTasks, Wiring
from pipedec.engine.rank_zero import RankZero
from pipedec.engine.tasks import TaskPipeline
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.engine.windows import WindowPipeline
from pipedec.messages import ErrorEvent, Event, TraceEvents, TraceRow
from pipedec.methods import LayerTreeOptions
from pipedec.scheduler.protocol import Message
from pipedec.text.prompt import Prompter
from pipedec.tracing import SCHEDULER_TRACK


class DraftLoop:
    """Rank 0 of a resident cluster. Serves one request after another without reloading anything."""

    def __init__(
        self,
        prompter: Prompter,
        drafter: Drafter | None,
        trained_masks: int,
        wiring: Wiring,
        tree: LayerTreeOptions | None = None,
    ) -> None:
        self._wiring = wiring
        self._scheduler = wiring.scheduler
        self._tasks = RankTasks(0, wiring)
        timed = None if drafter is None else TimedDrafter(drafter, self._tasks.recorder.drafting)
        self._admission = Admission(wiring.topology, prompter, wiring.sequences, timed, trained_masks, wiring.device, tree)
        self._stopping = False

    def run(self) -> None:
        """Serve until ``stop``.

        Raises:
            PipedecError: the run was aborted, a rank is lost, or Redis is.
        """
        while not self._stopping:
            message = self._tasks.request(POLL_SECONDS)
            if message is None:
                self._check_run()
            elif message.kind == "stop":
                self._stopping = True
            else:
                self._serve(message)
        while (message := self._tasks.request(0)) is not None:
            self._scheduler.publish(message.number, ErrorEvent("the cluster is being stopped"))

    def _check_run(self) -> None:
        if self._scheduler.status().state == "gone":
            raise SchedulerLost("Redis no longer knows the run: its keys were deleted")

    def _serve(self, message: Message) -> None:
        """Answer one request completely."""
        try:
            answer, method = self._admission.admit(message)
        except UserError as error:
            self._scheduler.publish(message.number, ErrorEvent(str(error)))
            return
        self.answer(answer, method)

    def answer(self, answer: Answer, method: Method) -> None:
        """From prefill until every rank has replayed the answer's last verdict."""
        request = answer.request
        self._wiring.tracer.enabled = request.trace
        driver: type[RankZero] = WindowPipeline if self._wiring.window else TaskPipeline
        pipeline = driver(request, method.masks, self._tasks, self._wiring)
        listeners = (self._tasks.note, answer.note)
        completed = False
        with pipeline.publishing():
            for verdict in decode(request, method, pipeline, partial(_accept, answer, pipeline), listeners):
                # The rows still in flight need as many timesteps to leave as there are groups; the client need not wait for them.
                if verdict.finished and not self._ranks_report(answer):
                    pipeline.publish(answer.completed(method))
                    completed = True
        pipeline.end([*self._trace(answer), *([] if completed else [answer.completed(method)])])
        self._stopping |= pipeline.is_stopping

    def _ranks_report(self, answer: Answer) -> bool:
        """Whether the client expects events from other ranks, which they send when the answer has ended."""
        request = answer.request
        return request.trace or self._wiring.emulation is not None or request.sampling.logprobs is not None

    def _trace(self, answer: Answer) -> list[Event]:
        """The scheduler's own trace of the answer, if one was asked for."""
        if not answer.request.trace:
            return []
        rows: list[TraceRow] = [
            (SCHEDULER_TRACK, granted.task.label, granted.task.kind, granted.granted_us, granted.finished_us)
            for granted in self._scheduler.trace()
        ]
        return [TraceEvents(rows)]


def _accept(answer: Answer, pipeline: RankZero, verdict: Verdict) -> Verdict:
    """Add a verdict to the answer and publish the new text; returns the verdict as far as the answer goes."""
    verdict, event = answer.take(verdict)
    pipeline.publish(event)
    return verdict
