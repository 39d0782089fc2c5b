"""The driver of the decode loop in which the scheduler grants every task and every transfer (PipeDec Appendix B).

One request at a time, as in the paper. Its prompt enters whole, and prefill is its first timestep.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import convert

from pipedec.core import Envelope, Opening, Step, Update, Verdict
from pipedec.engine.rank_zero import RankZero
from pipedec.engine.recorder import Timestep
from pipedec.scheduler.workflow import Facts, initial_tasks

PREFILL_CHUNK = 512  # tokens, so that activations of long prompts need no more memory


class TaskPipeline(RankZero):
    """Rank 0's driver of one request. A timestep is rank 0's dec and, if rows have reached the last stage, its sync."""

    _number = -1  # of the request
    _stages_know_the_end = False

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        (update,) = entering.updates or (Update(self._number),)
        if update.opening is not None:
            assert update.step is not None
            self._number = update.number
            verdict: Verdict | None = self._prefill(update.opening, update.step, meanwhile)
        else:
            verdict = self._decode(update.step, meanwhile)
        timing = self._tasks.recorder.timing()
        has_result = verdict is not None and bool(verdict.accepted or verdict.finished)
        results = (Update(self._number, verdict=verdict),) if has_result else ()
        is_full = number > self._wiring.topology.num_groups
        return self._tasks.timestep(number - 1, entering, results, timing if is_full else None)

    def close(self, last: Envelope) -> None:
        """A stop string that only rank 0 knows of cancels the rest, which ends with the next sync or when no rows are left."""
        if not self._stages_know_the_end:
            self._wiring.scheduler.cancel(self._number)
        while not self._stages_know_the_end and self._has_rows:
            self._decode(None, meanwhile=lambda: None)
        self._end()

    def _prefill(self, opening: Opening, prompt: Step, meanwhile: Callable[[], None]) -> Verdict:
        chunks = prefill_chunks(prompt.token_ids.tolist(), opening.prompt_length + len(opening.said))
        self._wiring.scheduler.begin(self._number, opening, initial_tasks(self._wiring.topology, chunks))
        for index in range(len(chunks)):
            self._take("pre")
            if index == 0:
                meanwhile()  # the draft model computes the whole prompt
            self._report(Facts())
        return self._take_verdict()

    def _decode(self, step: Step | None, meanwhile: Callable[[], None]) -> Verdict | None:
        rows = self._tasks.keep(step, self._held_task.seq)
        self._report(Facts(rows_out=rows, active=self._held.active))
        active = self._take("dec").active
        meanwhile()
        if not self._wiring.topology.has_sync(active):
            return None
        self._report(Facts(active=active))
        return self._take_verdict()

    def _take_verdict(self) -> Verdict:
        """Wait for the verdict with which every rank was told to sync."""
        verdict = convert(self._take("sync").payload["verdict"], Verdict)
        self._stages_know_the_end = verdict.finished is not None
        return verdict

    @property
    def _has_rows(self) -> bool:
        """Whether rows may be in the pipeline."""
        return self._held_task.name == "sync" or bool(self._held.active)


def prefill_chunks(token_ids: list[int], length: int) -> list[list[int]]:
    """The first ``length`` ids, which are tokens, in chunks of at most ``PREFILL_CHUNK``; the masks behind stay with the last."""
    starts = range(0, length, PREFILL_CHUNK)
    chunks = [token_ids[start : start + PREFILL_CHUNK] for start in starts]
    chunks[-1] = token_ids[starts[-1] :]
    return chunks
