"""The counters of the whole run, as clients read them."""

from __future__ import annotations

from bisect import bisect_left

from pipedec.decoding import Scheduler
from pipedec.decoding.events import Record, Timestep
from pipedec.messages.stats import Histogram, KVUsage, RunStats

ROW_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
SECOND_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class _Histogram:
    """Counts values up to each bound, and adds them up."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)


class RunCounters:
    """A listener that counts timesteps. Their rows and tokens are counted by the run's scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.timesteps = 0  # so far
        self._rows = _Histogram(ROW_BOUNDS)
        self._seconds = _Histogram(SECOND_BOUNDS)

    def on_record(self, record: Record) -> None:
        if isinstance(record, Timestep):
            self.timesteps += 1
            if rows := record.entered.num_rows:
                self._rows.add(rows)
            if record.timing is not None:
                self._seconds.add(record.timing.seconds)

    def stats(self) -> RunStats:
        """The counters so far."""
        scheduler, kv, tally = self._scheduler, self._scheduler.kv, self._scheduler.tally
        return RunStats(
            KVUsage(kv.capacity, kv.used_slots, kv.kept_slots, kv.queried_tokens, kv.adopted_tokens, tally.pauses),
            running=scheduler.num_running, waiting=scheduler.num_waiting, timesteps=self.timesteps,
            prompt_rows=tally.prompt_rows, root_rows=tally.root_rows, draft_rows=tally.draft_rows, mask_rows=tally.mask_rows,
            drafts=tally.drafts, accepted_tokens=tally.accepted_tokens, accepted_per_pos=tuple(tally.accepted_per_pos),
            rows_per_timestep=self._rows.histogram(), timestep_seconds=self._seconds.histogram(), corrupted=tally.corrupted,
            passage=scheduler.controller.full_passage,
        )  # fmt: skip
