"""Rank 0: takes requests from the queue, decodes them together, and streams the answers to their clients.

Decides nothing about rows: the company of decoding methods does. How rows reach the stages is the driver's business.
"""

from __future__ import annotations

import time

from pipedec.core import KNEE_ROWS, MAX_NUM_SEQS, Opening, Step, TokenLogprobs, Update, UserError, Verdict
from pipedec.decoding import Company, Drafter, Method
from pipedec.engine.admission import Admission
from pipedec.engine.answer import Answer
from pipedec.engine.loop import decode
from pipedec.engine.pool import Pool
from pipedec.engine.rank_tasks import POLL_SECONDS, RankTasks, Wiring
from pipedec.engine.rank_zero import RankZero
from pipedec.engine.request_queue import RequestQueue
from pipedec.engine.run_counters import RunCounters
from pipedec.engine.tasks import TaskPipeline
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.engine.windows import WindowPipeline
from pipedec.kv import KVManager
from pipedec.messages import CompletionEvent, ErrorEvent, PausedEvent, PromptLogprobsEvent, ResumedEvent, TraceEvents, TraceRow
from pipedec.methods import LayerTreeOptions
from pipedec.scheduler.protocol import Message
from pipedec.text.prompt import Prompter
from pipedec.tracing import SCHEDULER_TRACK

_TELLING_SECONDS = 1.0  # between two notes on what was counted


class DraftLoop:
    """Rank 0 of a resident cluster. Serves any number of requests without reloading anything.

    Args:
        knee: rows that a stage computes in about the time of one.
        max_num_seqs: most requests in the pipeline at the same time.
        kv: of the stages' KV pools.
    """

    def __init__(
        self,
        prompter: Prompter,
        drafter: Drafter | None,
        trained_masks: int,
        wiring: Wiring,
        tree: LayerTreeOptions | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        knee: int = KNEE_ROWS,
        kv: KVManager | None = None,
    ) -> None:
        self._wiring = wiring
        self._tasks = RankTasks(0, wiring)
        timed = None if drafter is None else TimedDrafter(drafter, self._tasks.recorder.drafting)
        self._company = Company(wiring.topology.num_groups, timed, wiring.device, trained_masks, knee, kv=kv)
        self._company.whole_prompts = not wiring.window
        self._admission = Admission(prompter, wiring.sequences, wiring.topology.num_stages, tree)
        self._max_num_seqs = max_num_seqs
        self._queue = RequestQueue(wiring.scheduler)
        self._counters = RunCounters(self._company)
        self._told = 0.0  # when the counters were told
        self._sessions = 0
        self._stopping = False

    def run(self) -> None:
        """Serve until ``stop``.

        Raises:
            PipedecError: the run was aborted, a rank is lost, or Redis is.
        """
        with self._queue.serving():
            while not self._stopping:
                message = self._tasks.request(self._queue.wait, POLL_SECONDS)
                if message is not None and message.kind == "stop":
                    self._stopping = True
                elif message is not None:
                    self._serve(message)
            self._queue.refuse("the cluster is being stopped")

    def _serve(self, first: Message) -> None:
        """One session: from a request that finds the pipeline empty until no request is left."""
        pool = Pool(self._company)
        self._admit(pool, first)
        if not pool.is_busy:
            return
        pipeline = self._pipeline()
        for _ in decode(pool, pipeline, lambda: self._follow_queue(pool), (self._tasks.note, self._counters.note)):
            continue  # everything has been said to the answers' readers
        self._stopping |= pipeline.is_stopping
        self._tell_counters()

    def _pipeline(self) -> RankZero:
        if not self._wiring.window:
            return TaskPipeline(self._tasks, self._wiring)
        self._sessions += 1
        return WindowPipeline(self._sessions, self._tasks, self._wiring)

    def _follow_queue(self, pool: Pool) -> None:
        """Begin requests for which there is room, and end those that were cancelled."""
        if time.monotonic() > self._told + _TELLING_SECONDS:
            self._tell_counters()
        if not self._wiring.window:
            return  # task dispatch: a request is cancelled at its next verdict, and the next one has a workflow of its own
        for number in self._queue.cancelled():
            pool.cancel(number)
        room = 0 if self._queue.is_stopping else self._max_num_seqs - pool.num_running
        for message in self._queue.arrivals(room):
            self._admit(pool, message)

    def _tell_counters(self) -> None:
        """Let clients know what was counted."""
        self._told = time.monotonic()
        self._queue.tell(self._counters.stats())

    def _admit(self, pool: Pool, message: Message) -> None:
        try:
            answer, new_sequence = self._admission.admit(message, self._company)
        except UserError as error:
            self._queue.finish(message.number, ErrorEvent(str(error)))
            return
        if answer.is_complete:
            self._queue.finish(message.number, answer.completed())
            return
        self._tasks.opened(message.number, answer.request.trace)
        pool.open(answer.request, new_sequence, _Stream(answer, self._queue, self._tasks, self._wiring))


class _Stream:
    """The ``Reader`` of a request: what is said of it goes to its client.

    Other ranks publish traces, and timesteps that overran, when they close the request's lane. So the completion of a request
    that is traced or emulated, the last event that its client reads, waits until they have.
    """

    def __init__(self, answer: Answer, queue: RequestQueue, tasks: RankTasks, wiring: Wiring) -> None:
        self._answer = answer
        self._number = answer.request.number
        self._queue = queue
        self._tasks = tasks
        self._wiring = wiring
        self._waits_for_ranks = answer.request.trace or wiring.emulation is not None
        self._completion: CompletionEvent | None = None
        self._finished = False
        self._waits = False
        self._began_us = wiring.scheduler.clock_us() if answer.request.trace else 0

    def waits(self) -> None:
        self._answer.counters.waits()
        self._waits = True
        self._queue.put(self._number, PausedEvent())

    def opened(self, opening: Opening) -> None:
        self._answer.opened(opening)
        if self._waits:
            self._waits = False
            self._queue.put(self._number, ResumedEvent())

    def entered(self, step: Step) -> None:
        self._answer.counters.entered(step)

    def take(self, result: Update, timestep: int) -> Verdict:
        assert result.verdict is not None
        self._answer.counters.accepted(timestep)
        return self._publish(result.verdict, result.logprobs)

    def scored(self, logprobs: TokenLogprobs) -> None:
        if logprobs:
            self._queue.put(self._number, PromptLogprobsEvent(list(map(list, logprobs))))

    def ended(self, reason: str, method: Method) -> None:
        if not self._finished:  # cancelled, so that no verdict has said so
            self._publish(Verdict((), reason))
        completion = self._answer.completed(method)
        if self._waits_for_ranks:
            self._completion = completion
        else:
            self._queue.finish(self._number, completion)

    def closed(self) -> None:
        if self._completion is not None:
            events = [*self._scheduler_trace(), *self._tasks.closed(self._number), self._completion]
            self._queue.finish(self._number, *events)

    def _publish(self, verdict: Verdict, logprobs: TokenLogprobs = ()) -> Verdict:
        """Add a verdict to the answer and publish what is new; returns the verdict as far as the answer goes."""
        verdict, events = self._answer.take(verdict, logprobs)
        self._finished = verdict.finished is not None
        self._queue.put(self._number, *events)
        return verdict

    def _scheduler_trace(self) -> list[TraceEvents]:
        """The scheduler's own trace, if one was asked for."""
        if not self._answer.request.trace:
            return []
        rows: list[TraceRow] = [
            (SCHEDULER_TRACK, granted.task.label, granted.task.kind, granted.granted_us, granted.finished_us)
            for granted in self._wiring.scheduler.trace()
            if granted.finished_us >= self._began_us
        ]
        return [TraceEvents(rows)]
