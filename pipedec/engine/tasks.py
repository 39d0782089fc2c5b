"""The driver of the decode loop in which the scheduler grants every task and every transfer (PipeDec Appendix B)."""

from __future__ import annotations

from collections.abc import Callable

from pipedec.core import Envelope, Verdict
from pipedec.engine.rank_zero import RankZero
from pipedec.engine.recorder import Timestep
from pipedec.scheduler.workflow import Facts


class TaskPipeline(RankZero):
    """Rank 0's driver. A timestep is rank 0's dec and, if rows have reached the last stage, its sync."""

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        rows = self._tasks.keep(entering.step, number - 1)
        self._report(Facts(rows_out=rows, active=self._held.active))
        active = self._take("dec").active
        meanwhile()
        verdict = None
        if self._wiring.topology.has_sync(active):
            self._report(Facts(active=active))
            verdict = self._take_verdict()
        timing = self._tasks.recorder.timing()
        is_full = number >= self._wiring.topology.num_groups
        has_result = verdict is not None and bool(verdict.accepted or verdict.finished)
        return self._tasks.timestep(number, entering.step, verdict if has_result else None, timing if is_full else None)

    def close(self, last: Verdict) -> None:
        """A stop string that only rank 0 knows of cancels the rest, which ends with the next sync or when no rows are left."""
        if not self._stages_know_the_end:
            self._wiring.scheduler.cancel(self._request.number)
        while not self._stages_know_the_end and self._has_rows:
            self.advance(self._held_task.seq + 1, Envelope(), meanwhile=lambda: None)
        self._end()

    @property
    def _has_rows(self) -> bool:
        """Whether rows may be in the pipeline."""
        return self._held_task.name == "sync" or bool(self._held.active)
