"""The counters of running requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pipedec.core import Metrics, Step
from pipedec.engine.records import Advanced, Record, RequestClosed, RequestEnded, RequestOpened, Timestep, Waits

_STEPS_AT_ONCE = 64


@dataclass(slots=True)
class _RequestCounters:
    """The counters of one request.

    Attributes:
        began: in seconds.
        has_opened: it has had a lane.
        prefilled: timestep and seconds of its first verdict.
        steps: steps whose draft tokens are not counted yet.
        draft_tokens: int64 [], of all other steps since the first verdict.
    """

    metrics: Metrics
    began: float
    has_opened: bool = False
    prefilled: tuple[int, float] | None = None
    steps: list[Step] = field(default_factory=list)
    draft_tokens: torch.Tensor | int = 0

    def count_steps(self) -> None:
        """Count the rows that are neither roots, which are certain, nor masks. They are counted on the device that holds them,
        without waiting for it.
        """
        parents = torch.cat([step.parents for step in self.steps])
        token_ids = torch.cat([step.token_ids for step in self.steps])
        self.draft_tokens = self.draft_tokens + ((parents >= 0) & (token_ids >= 0)).sum()
        self.steps.clear()


class Counters:
    """A listener that fills the metrics of requests while they run. Timesteps and draft tokens are counted from a request's first
    verdict on, which ends its prefill; draft tokens of many steps at once.

    Attributes:
        now: returns the time in seconds, on emulated devices if times are computed.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
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
            case Advanced():
                one, now = self._requests[record.number], self.now()
                first, prefilled = one.prefilled = one.prefilled or (record.timestep, now)
                one.metrics.timesteps = record.timestep - first
                one.metrics.prefill_seconds, one.metrics.decode_seconds = prefilled - one.began, now - prefilled
            case RequestOpened() if not self._requests[record.number].has_opened:
                one, opening = self._requests[record.number], record.opening
                one.has_opened = True
                one.metrics.cached_tokens = min(opening.cached, opening.prompt_length)
            case Waits():
                one = self._requests[record.number]
                one.metrics.pauses += one.has_opened
            case RequestEnded():
                one = self._requests[record.number]
                if one.steps:
                    one.count_steps()
                one.metrics.hits, one.metrics.misses = record.hits, record.misses
                one.metrics.draft_tokens = int(one.draft_tokens)
            case RequestClosed():
                self._requests.pop(record.number, None)
