"""A stage worker that a test takes through a timestep piece by piece: what it has computed waits, as with single tasks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pipedec.core.stage_message import EMPTY, Load, NewRequest, RequestUpdate, SlotRuns, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.stage import FinalStageWorker, StageWorker


class DrivenStage:
    """Everything else is the worker's own.

    Attributes:
        load: of what was computed last.
    """

    def __init__(self, worker: StageWorker) -> None:
        self.worker = worker
        self.load = Load()
        self._waiting = EMPTY
        self._results: tuple[RequestUpdate, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def open(self, number: int, opening: NewRequest) -> None:
        self.worker.replay([RequestUpdate(number, opening)])

    def extend(self, number: int, slots: SlotRuns) -> None:
        self.worker.replay([RequestUpdate(number, slots=slots)])

    def sync(self, number: int, verdict: Verdict) -> None:
        """Replay a verdict, which prunes what waits."""
        self._waiting = self.worker.replay([RequestUpdate(number, verdict=verdict)], self._waiting)

    def compute(self, steps: Mapping[int, Step]) -> None:
        self.load = Load()
        message = StageMessage(tuple(RequestUpdate(number, step=step) for number, step in steps.items()))
        reply = self.worker.advance(message, self._note_load)
        if isinstance(self.worker, FinalStageWorker):
            self._results += reply.updates
        else:
            self._waiting = reply

    def _note_load(self, name: str, load: Load) -> AbstractContextManager[None]:
        self.load = load
        return nullcontext()

    def outgoing(self) -> dict[int, Step]:
        """Take what waits."""
        waiting, self._waiting = self._waiting, EMPTY
        return {update.number: update.step for update in waiting.updates if update.step is not None}

    def results(self) -> tuple[RequestUpdate, ...]:
        """Take what the last stage has said."""
        results, self._results = self._results, ()
        return results
