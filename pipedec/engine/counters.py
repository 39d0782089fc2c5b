"""Two listeners that count: the metrics of each request, and the counters of the whole run, as clients read them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pipedec.core.completion import Metrics
from pipedec.core.stage_message import Step
from pipedec.decoding import Batch
from pipedec.engine.loop import Advanced, Record, RequestClosed, RequestEnded, RequestOpened, Timestep, Waits
from pipedec.messages.stats import Histogram, KVUsage, RunStats

_STEPS_AT_ONCE = 64
ROW_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
SECOND_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(slots=True)
class _RequestCounters:
    """The counters of one request."""

    metrics: Metrics
    began: float  # in seconds
    has_opened: bool = False  # it has had a lane
    prefilled: tuple[int, float] | None = None  # timestep and seconds of its first verdict
    steps: list[Step] = field(default_factory=list)  # steps whose draft tokens are not counted yet
    draft_tokens: torch.Tensor | int = 0  # int64 [], of all other steps since the first verdict

    def count_steps(self) -> None:
        """Count the rows that are neither roots nor masks, on the device that holds them, without waiting for it."""
        parents = torch.cat([step.parents for step in self.steps])
        token_ids = torch.cat([step.token_ids for step in self.steps])
        self.draft_tokens = self.draft_tokens + ((parents >= 0) & (token_ids >= 0)).sum()
        self.steps.clear()


class Counters:
    """Fills the metrics of requests while they run. Timesteps and draft tokens count from a request's first verdict on."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now  # returns the time in seconds, on emulated devices if times are computed
        self._requests: dict[int, _RequestCounters] = {}

    def begin(self, number: int, metrics: Metrics) -> None:
        """Fill ``metrics`` until the request is closed."""
        self._requests[number] = _RequestCounters(metrics, self.now())

    def note(self, record: Record) -> None:
        """Count a record. Waits for the device of the draft model when a request has ended."""
        match record:
            case Timestep():
                for update in record.entered.updates:
                    if update.step is not None and (one := self._requests[update.number]).prefilled is not None:
                        one.steps.append(update.step)
                        if len(one.steps) == _STEPS_AT_ONCE:
                            one.count_steps()
            case Advanced(number):
                one, now = self._requests[number], self.now()
                first, prefilled = one.prefilled = one.prefilled or (record.timestep, now)
                one.metrics.timesteps = record.timestep - first
                one.metrics.prefill_seconds, one.metrics.decode_seconds = prefilled - one.began, now - prefilled
            case RequestOpened(number):
                one, opening = self._requests[number], record.opening
                if not one.has_opened:
                    one.has_opened = True
                    one.metrics.cached_tokens = min(opening.cached, opening.prompt_length)
            case Waits(number):
                one = self._requests[number]
                one.metrics.pauses += one.has_opened
            case RequestEnded(number):
                one = self._requests[number]
                if one.steps:
                    one.count_steps()
                one.metrics.hits, one.metrics.misses = record.hits, record.misses
                one.metrics.draft_tokens = int(one.draft_tokens)
            case RequestClosed(number):
                self._requests.pop(number, None)


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
    """Counts timesteps; their rows and tokens are counted by the batch of the run's requests."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.timesteps = 0  # so far
        self._rows = _Histogram(ROW_BOUNDS)
        self._seconds = _Histogram(SECOND_BOUNDS)

    def note(self, record: Record) -> None:
        if isinstance(record, Timestep):
            self.timesteps += 1
            if rows := record.entered.num_rows:
                self._rows.add(rows)
            if record.timing is not None:
                self._seconds.add(record.timing.seconds)

    def stats(self) -> RunStats:
        """The counters so far."""
        batch, kv, tally = self._batch, self._batch.kv, self._batch.tally
        return RunStats(
            KVUsage(kv.capacity, kv.used_slots, kv.kept_slots, kv.queried_tokens, kv.adopted_tokens, tally.pauses),
            running=batch.num_running, waiting=batch.num_waiting, timesteps=self.timesteps,
            prompt_rows=tally.prompt_rows, root_rows=tally.root_rows, draft_rows=tally.draft_rows, mask_rows=tally.mask_rows,
            drafts=tally.drafts, accepted_tokens=tally.accepted_tokens, accepted_per_pos=tuple(tally.accepted_per_pos),
            rows_per_timestep=self._rows.histogram(), timestep_seconds=self._seconds.histogram(), corrupted=tally.corrupted,
            passage=batch.full_passage,
        )  # fmt: skip
