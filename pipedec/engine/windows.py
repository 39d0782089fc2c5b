"""The driver of the decode loop that needs Redis once per window: many timesteps are granted at once.

Inside a window every rank sends one envelope per timestep to the next rank, and the last stage sends its verdict to rank 0. A
verdict travels with the rows: rank 0 puts it into its next envelope, and each stage replays it before it computes the rows behind
it. So all ranks prune between the same two steps, and no rank waits for Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from pipedec.core import Envelope, MaskParams, Request, Verdict
from pipedec.engine.publisher import AnswerPublisher
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.engine.rank_zero import RankZero
from pipedec.engine.recorder import Timestep
from pipedec.messages import Event
from pipedec.scheduler.workflow import Facts, Task


class WindowPipeline(RankZero):
    """Rank 0's driver. The result of a step arrives after as many timesteps as there are groups."""

    def __init__(self, request: Request, masks: MaskParams, tasks: RankTasks, wiring: Wiring) -> None:
        super().__init__(request, masks, tasks, wiring)
        self._publisher = AnswerPublisher(wiring.scheduler)
        self._begun = 0  # the last timestep that has begun
        self._granted = 0  # the last timestep of the present window
        self._in_flight = 0  # timesteps whose result the last stage has not sent yet
        self._returned = time.perf_counter()  # when the last timestep ended

    @contextmanager
    def publishing(self) -> Iterator[None]:
        with self._publisher.publishing(self._request.number):
            yield

    def publish(self, event: Event) -> None:
        self._publisher.put(event)

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        if number == 1:
            entering = Envelope(entering.step)  # the stages have replayed the first verdict: prefill ends with a sync
        elif entering.verdict is not None:
            self._record_sync()
        self._send(entering, number)
        with self._tasks.recorder.span(Task.compute("dec", 0, number).label, "dec"):
            meanwhile()
        if self._in_flight < self._wiring.topology.num_groups:
            self._tasks.recorder.restart()  # the pipeline is still filling
            return self._tasks.timestep(number, entering.step)
        verdict = self._receive()
        self._returned = time.perf_counter()
        if verdict is not None and self._publisher.is_cancelled:
            verdict = replace(verdict, finished=verdict.finished or "cancelled")
        return self._tasks.timestep(number, entering.step, verdict, self._tasks.recorder.timing())

    def close(self, last: Verdict) -> None:
        if not self._stages_know_the_end:
            self._record_sync()
            self._send(Envelope(verdict=last), self._begun + 1)
            while self._in_flight:
                self._receive()
        self._end()

    def _send(self, envelope: Envelope, number: int) -> None:
        """Begin a timestep, in the next window if the present one is over."""
        if number > self._granted:
            self._report(Facts(window=self._wiring.window))
            self._granted += self._take("window").payload["timesteps"]
        self._begun = number
        self._tasks.send(envelope, 1, number)
        self._in_flight += 1

    def _record_sync(self) -> None:
        """What rank 0 did with the last result ends now."""
        self._tasks.recorder.add(Task.compute("sync", 0, self._begun).label, "sync", self._returned)

    def _receive(self) -> Verdict | None:
        with self._tasks.recorder.waiting():
            verdict = self._wiring.transport.receive_envelope(self._wiring.topology.final_rank).verdict
        self._in_flight -= 1
        return verdict
