"""Rank 0: takes requests from the queue, decodes them together, and streams the answers to their clients.

Decides nothing about rows: the company of decoding methods does. How rows reach the stages is the driver's business.
"""

from __future__ import annotations

from pipedec.core import SchedulerLost, Step, Update, UserError, Verdict
from pipedec.decoding import Company, Drafter, Method
from pipedec.engine.admission import Admission
from pipedec.engine.answer import Answer
from pipedec.engine.courier import Courier
from pipedec.engine.loop import decode
from pipedec.engine.pool import Pool
from pipedec.engine.rank_tasks import POLL_SECONDS, RankTasks, Wiring
from pipedec.engine.rank_zero import RankZero
from pipedec.engine.tasks import TaskPipeline
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.engine.windows import WindowPipeline
from pipedec.messages import CompletionEvent, ErrorEvent, LogprobsEvent, TraceEvents, TraceRow
from pipedec.methods import LayerTreeOptions
from pipedec.scheduler.protocol import Message
from pipedec.text.prompt import Prompter
from pipedec.tracing import SCHEDULER_TRACK


class DraftLoop:
    """Rank 0 of a resident cluster. Serves any number of requests without reloading anything.

    Args:
        knee: rows of a timestep that a stage computes as fast as one; None for the default.
        max_num_seqs: most requests in the pipeline at the same time.
    """

    def __init__(
        self,
        prompter: Prompter,
        drafter: Drafter | None,
        trained_masks: int,
        wiring: Wiring,
        tree: LayerTreeOptions | None = None,
        max_num_seqs: int = 64,
        knee: int | None = None,
    ) -> None:
        self._wiring = wiring
        self._scheduler = wiring.scheduler
        self._tasks = RankTasks(0, wiring)
        timed = None if drafter is None else TimedDrafter(drafter, self._tasks.recorder.drafting)
        knees = {} if knee is None else {"knee": knee}
        self._company = Company(wiring.topology.num_groups, timed, wiring.device, trained_masks, **knees)
        self._company.whole_prompts = not wiring.window
        self._admission = Admission(prompter, wiring.sequences, wiring.topology.num_stages, tree)
        self._max_num_seqs = max_num_seqs if wiring.window else 1
        self._courier = Courier(self._scheduler)
        self._sessions = 0
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
        """One session: from a request that finds the pipeline empty until no request is left."""
        self._sessions += 1
        session = _Session(self._sessions, message)
'''
