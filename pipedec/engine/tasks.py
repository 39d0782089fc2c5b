"""The driver of the decode loop in which the scheduler grants every task and every transfer (PipeDec, Appendices A and B).

The first message of a session passes all stages before anything else enters, which is the paper's prefill; later ones follow each
other. Accepted tokens do not travel with the rows: the last stage reports them to Redis, and every rank replays them in a sync.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from pipedec.core import EMPTY, RequestUpdate, StageMessage, Verdict
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.engine.rank_zero import RankZero
from pipedec.engine.records import Timestep
from pipedec.scheduler.paper import Facts, initial_tasks, post_process, results_of
from pipedec.scheduler.protocol import TASKS_TRACE
from pipedec.scheduler.workflow import Planned


class TaskPipeline(RankZero):
    """Rank 0's driver of one session. A timestep is rank 0's dec and, if a row has reached the last stage, its sync."""

    def __init__(self, session: int, tasks: RankTasks, wiring: Wiring) -> None:
        super().__init__(tasks, wiring)
        self._session = session
        self._traced = set[int]()  # requests
        self._trace_lines = 0

    def advance(self, number: int, entering: StageMessage, meanwhile: Callable[[], None]) -> Timestep:
        message = _without_replayed(entering)
        self._note_traced(message)
        results = self._prefill(message, meanwhile) if number == 1 else self._decode(message, meanwhile)
        timing = self._tasks.recorder.timing()
        is_full = number > self._wiring.topology.num_groups
        return self._tasks.timestep(number - 1, entering, results, timing if is_full else None)

    def close(self, last: StageMessage) -> None:
        self._decode(_without_replayed(last), meanwhile=lambda: None)
        while self._held.task.name == "sync" or self._held.active:
            self._decode(EMPTY, meanwhile=lambda: None)
        self._end(self._following(Facts(active=self._held.active, finished=True)))

    def _prefill(self, message: StageMessage, meanwhile: Callable[[], None]) -> tuple[RequestUpdate, ...]:
        """Pass the message through all groups, while rank 0 drafts as in as many timesteps."""
        topology = self._wiring.topology
        self._wiring.scheduler.begin_session(self._session, initial_tasks(topology), self._trace_lines)

        def draft() -> None:
            for _ in topology.groups:
                meanwhile()

        return self._compute("pre", message, draft)

    def _decode(self, message: StageMessage, meanwhile: Callable[[], None]) -> tuple[RequestUpdate, ...]:
        facts = Facts(has_output=bool(message.updates), active=self._held.active)
        self._tasks.report([self._held.task], self._following(facts), trace_lines=self._trace_lines)
        return self._compute("dec", message, meanwhile)

    def _compute(self, name: str, message: StageMessage, meanwhile: Callable[[], None]) -> tuple[RequestUpdate, ...]:
        """Send the message, draft, and wait for the results of the last stage, if it had rows."""
        granted = self._take(name)
        if message.updates or name == "pre":
            self._tasks.send(message, 1, granted.task.seq - 1)
        with self._tasks.recorder.span(granted.task.label, name):
            meanwhile()
        if name == "dec" and not self._wiring.topology.has_sync(granted.active):
            return ()
        self._tasks.report([granted.task], self._following(Facts(active=granted.active)))
        return results_of(self._take("sync").payload)

    def _following(self, facts: Facts) -> list[Planned]:
        return post_process(self._held.task, self._wiring.topology, facts)

    def _note_traced(self, message: StageMessage) -> None:
        """Trace the tasks while a traced request runs."""
        for update in message.updates:
            if update.opening is not None and update.opening.trace:
                self._traced.add(update.number)
            if update.verdict is not None and update.verdict.finished is not None:
                self._traced.discard(update.number)
        self._trace_lines = TASKS_TRACE if self._traced else 0


def _without_replayed(entering: StageMessage) -> StageMessage:
    """The message without accepted tokens, which the stages have replayed in syncs. Ends of answers stay in it."""
    updates = (replace(update, verdict=_end_of(update.verdict)) for update in entering.updates)
    return StageMessage(tuple(update for update in updates if update != RequestUpdate(update.number)))


def _end_of(verdict: Verdict | None) -> Verdict | None:
    return Verdict((), verdict.finished) if verdict is not None and verdict.finished is not None else None
