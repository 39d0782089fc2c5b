"""The driver of the decode loop that needs Redis once per window: many timesteps are granted at once, for all running requests.

Inside a window every rank sends one envelope per timestep to the next rank, and the last stage sends its results to rank 0. A
verdict travels with the rows: rank 0 puts it into its next envelope, and each stage replays it before it computes the rows of
that envelope. So all ranks prune between the same two steps, no rank waits for Redis, and a request may begin or end at any
timestep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipedec.core import RequestUpdate, StageMessage
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.engine.rank_zero import RankZero
from pipedec.engine.records import Timestep
from pipedec.scheduler.protocol import SESSION_TRACE
from pipedec.scheduler.transfers import checked_transfers
from pipedec.scheduler.workflow import Task, after_window, initial_windows


class WindowPipeline(RankZero):
    """Rank 0's driver of one session. The result of a step arrives after as many timesteps as there are groups."""

    def __init__(self, session: int, tasks: RankTasks, wiring: Wiring) -> None:
        super().__init__(tasks, wiring)
        self._begun = 0  # the last timestep that has begun
        self._granted = 0  # the last timestep of the present window
        self._in_flight = 0  # timesteps whose results the last stage has not sent yet
        self._returned = tasks.recorder.record_event()  # when the last timestep ended
        wiring.scheduler.begin_session(session, initial_windows(wiring.topology, wiring.window), SESSION_TRACE)

    def advance(self, number: int, entering: StageMessage, meanwhile: Callable[[], None]) -> Timestep:
        if any(update.verdict is not None for update in entering.updates):
            self._record_sync()
        self._send(entering, number)
        with self._tasks.recorder.span(Task.compute("dec", 0, number).label, "dec"):
            meanwhile()
        if self._in_flight < self._wiring.topology.num_groups:
            self._tasks.recorder.restart()  # the pipeline is still filling
            return self._tasks.timestep(number, entering)
        results = self._receive()
        self._returned = self._tasks.recorder.record_event()
        return self._tasks.timestep(number, entering, results, self._tasks.recorder.timing())

    def close(self, last: StageMessage) -> None:
        self._record_sync()
        self._send(replace(last, ends_session=True), self._begun + 1)
        while self._in_flight:
            self._receive()
        self._end(after_window(self._held.task, self._wiring.topology, 0))

    def _send(self, envelope: StageMessage, number: int) -> None:
        """Begin a timestep, in the next window if the present one is over."""
        if number > self._granted:
            topology = self._wiring.topology
            if self._granted:
                self._tasks.report([self._held.task], after_window(self._held.task, topology, self._wiring.window))
            payload = self._take("window").payload
            checked_transfers(payload["transfers"], 0, topology, self._wiring.duplex)
            self._granted += payload["timesteps"]
        self._begun = number
        self._tasks.send(envelope, 1, number)
        self._in_flight += 1

    def _record_sync(self) -> None:
        """End the span of rank 0's work on the last results."""
        self._tasks.recorder.add(Task.compute("sync", 0, self._begun).label, "sync", self._returned)

    def _receive(self) -> tuple[RequestUpdate, ...]:
        with self._tasks.recorder.waiting():
            results = self._tasks.receive(self._wiring.topology.final_rank).updates
        self._in_flight -= 1
        return results
