"""Rank 0's two drivers of the decode loop, each for one session. The driver brings rows to the stages and results back.

``WindowPipeline`` needs Redis once per window: many timesteps are granted at once, for all running requests. Inside a window
every rank sends one message per timestep to the next rank, and the last stage sends its results to rank 0. A verdict travels
with the rows: rank 0 puts it into its next message, and each stage replays it before it computes the rows of that message. So
all ranks prune between the same two steps, and a request may begin or end at any timestep.

In ``TaskPipeline`` the scheduler grants every task and every transfer (PipeDec, Appendices A and B). The first message of a
session passes all stages before anything else enters, which is the paper's prefill; later ones follow each other. Accepted tokens
do not travel with the rows: the last stage reports them to Redis, and every rank replays them in a sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from pipedec.core.stage_message import EMPTY, RequestUpdate, StageMessage
from pipedec.core.verdict import Verdict
from pipedec.decoding.events import Timestep
from pipedec.engine.loop import go_together
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.scheduler.paper import Facts, initial_tasks, post_process, results_of
from pipedec.scheduler.protocol import SESSION_TRACE, TASKS_TRACE, Granted
from pipedec.scheduler.workflow import Planned, Task, after_window, checked_transfers, initial_windows


class _Driver:
    """The scheduler hands out tasks and expects reports, the loop calls ``advance``. So a task is held until its successors are
    known: the rows that the loop proposes next.
    """

    def __init__(self, tasks: RankTasks, wiring: Wiring) -> None:
        self._tasks = tasks
        self._recorder = tasks.recorder
        self._wiring = wiring
        self._topology = wiring.topology
        self._held = Granted(Task.compute("end", 0, 0))
        self.is_stopping = False  # the run was asked to stop; the running requests are finished first

    def _take(self, name: str) -> Granted:
        """Wait for rank 0's next tasks, the last of which is a ``name``, and hold that one. A transfer may come before it."""
        while not (message := self._tasks.next()).tasks:
            self.is_stopping |= message.kind == "stop"
        self._held = message.tasks[-1]
        assert self._held.task.name == name, f"rank 0 got {self._held.task.id} instead of a {name}"
        return self._held

    def _end(self, planned: Sequence[Planned]) -> None:
        """Report the last task, and end the session."""
        self._tasks.report([self._held.task], planned)
        self._take("end")
        self._tasks.report([self._held.task], [], waits=False)


class WindowPipeline(_Driver):
    """Waits for a result only when ``passage`` timesteps are in flight: in the groups, and on the links between them."""

    def __init__(self, session: int, tasks: RankTasks, wiring: Wiring) -> None:
        super().__init__(tasks, wiring)
        self._begun = 0  # the last timestep that has begun
        self._granted = 0  # the last timestep of the present window
        self._in_flight = 0  # timesteps whose results were not returned yet
        self._early: tuple[RequestUpdate, ...] | None = None  # of the oldest of them, if they have arrived
        self._returned = tasks.recorder.record_event()  # when the last timestep ended
        wiring.scheduler.begin_session(session, initial_windows(wiring.topology, wiring.window), SESSION_TRACE)

    def run_timestep(self, number: int, entering: StageMessage, passage: int, meanwhile: Callable[[], None]) -> Timestep:
        if any(update.verdict is not None for update in entering.updates):
            self._record_sync()
        self._send(entering, number)
        with self._recorder.span(Task.compute("dec", 0, number).label, "dec"):
            meanwhile()
        if self._in_flight < passage:
            self._recorder.restart()  # the pipeline is still filling
            return self._tasks.timestep(number, entering)
        results: tuple[RequestUpdate, ...] = ()
        while self._in_flight >= passage:
            arrived, self._early = self._receive() if self._early is None else self._early, None
            if not go_together(results, arrived):
                self._early = arrived
                break
            results += arrived
            self._in_flight -= 1
        self._returned = self._recorder.record_event()
        return self._tasks.timestep(number, entering, results, self._recorder.timing())

    def end_session(self, last: StageMessage) -> None:
        self._record_sync()
        self._send(replace(last, ends_session=True), self._begun + 1)
        for _ in range(self._in_flight - (self._early is not None)):
            self._receive()
        self._end(after_window(self._held.task, self._topology, 0))

    def _record_sync(self) -> None:
        """End the span of rank 0's work on the last results."""
        self._recorder.add(Task.compute("sync", 0, self._begun).label, "sync", self._returned)

    def _send(self, message: StageMessage, number: int) -> None:
        """Begin a timestep, in the next window if the present one is over."""
        if number > self._granted:
            if self._granted:
                self._tasks.report([self._held.task], after_window(self._held.task, self._topology, self._wiring.window))
            payload = self._take("window").payload
            checked_transfers(payload["transfers"], 0, self._topology, self._wiring.duplex)
            self._granted += payload["timesteps"]
        self._begun = number
        self._tasks.send(message, 1, number)
        self._in_flight += 1

    def _receive(self) -> tuple[RequestUpdate, ...]:
        with self._recorder.waiting():
            return self._tasks.receive(self._topology.final_rank).updates


class TaskPipeline(_Driver):
    """A timestep is rank 0's dec and, if a row has reached the last stage, its sync. The passage is the number of groups."""

    def __init__(self, session: int, tasks: RankTasks, wiring: Wiring) -> None:
        super().__init__(tasks, wiring)
        self._session = session
        self._traced = set[int]()  # requests
        self._trace_lines = 0

    def run_timestep(self, number: int, entering: StageMessage, passage: int, meanwhile: Callable[[], None]) -> Timestep:
        message = _without_replayed(entering)
        for update in message.updates:  # trace the tasks while a traced request runs
            if update.opening is not None and update.opening.trace:
                self._traced.add(update.number)
            if update.verdict is not None and update.verdict.finished is not None:
                self._traced.discard(update.number)
        self._trace_lines = TASKS_TRACE if self._traced else 0
        if number > 1:
            results = self._decode(message, meanwhile)
        else:  # the message passes all groups, while rank 0 drafts as in as many timesteps
            self._wiring.scheduler.begin_session(self._session, initial_tasks(self._topology), self._trace_lines)
            results = self._compute("pre", message, meanwhile, passage)
        timing = self._recorder.timing()
        return self._tasks.timestep(number - 1, entering, results, timing if number > passage else None)

    def end_session(self, last: StageMessage) -> None:
        self._decode(_without_replayed(last), meanwhile=lambda: None)
        while self._held.task.name == "sync" or self._held.active:
            self._decode(EMPTY, meanwhile=lambda: None)
        self._end(self._following(Facts(active=self._held.active, finished=True)))

    def _decode(self, message: StageMessage, meanwhile: Callable[[], None]) -> tuple[RequestUpdate, ...]:
        facts = Facts(has_output=bool(message.updates), active=self._held.active)
        self._tasks.report([self._held.task], self._following(facts), trace_lines=self._trace_lines)
        return self._compute("dec", message, meanwhile)

    def _compute(self, name: str, message: StageMessage, draft: Callable[[], None], times: int = 1) -> tuple[RequestUpdate, ...]:
        """Send the message, draft, and wait for the results of the last stage, if it had rows."""
        granted = self._take(name)
        if message.updates or name == "pre":
            self._tasks.send(message, 1, granted.task.seq - 1)
        with self._recorder.span(granted.task.label, name):
            for _ in range(times):
                draft()
        if name == "dec" and not self._topology.has_sync(granted.active):
            return ()
        self._tasks.report([granted.task], self._following(Facts(active=granted.active)))
        return results_of(self._take("sync").payload)

    def _following(self, facts: Facts) -> list[Planned]:
        return post_process(self._held.task, self._topology, facts)


def _without_replayed(entering: StageMessage) -> StageMessage:
    """The message without accepted tokens, which the stages have replayed in syncs. Ends of answers stay in it."""
    left: list[RequestUpdate] = []
    for update in entering.updates:
        finished = None if update.verdict is None else update.verdict.finished
        one = structs.replace(update, verdict=None if finished is None else Verdict((), finished))
        if one != RequestUpdate(update.number):
            left.append(one)
    return StageMessage(tuple(left))
