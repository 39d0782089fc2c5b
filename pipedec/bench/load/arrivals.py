"""How requests arrive: a fixed number at a time, or at random times of a rate. Knows no clock: it is told the time."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from pipedec.core import UserError


@dataclass(frozen=True)
class Pattern:
    """Which load is offered: one of the two.

    Attributes:
        concurrency: requests that are always unfinished; one that ends is followed by the next.
        rate: mean number of requests per second, whose arrivals are a Poisson process that begins with one.

    Raises:
        UserError: a number is not positive.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise UserError(f"--concurrency must be at least 1, not {self.concurrency}")
        if self.rate is not None and not 0 < self.rate < 1e6:
            raise UserError(f"--rate must be above 0 requests per second, not {self.rate:g}")

    @property
    def label(self) -> str:
        return f"{self.concurrency} concurrent" if self.concurrency is not None else f"{self.rate:g}/s"

    def arrivals(self, total: int, seed: int) -> Arrivals:
        """The arrivals of ``total`` requests."""
        if self.concurrency is not None:
            return Concurrent(total, self.concurrency)
        assert self.rate is not None
        gaps = map(random.Random(seed).expovariate, [self.rate] * (total - 1))
        return AtTimes(accumulate(gaps, initial=0.0))


class Arrivals(Protocol):
    """Tells when requests are to be submitted. Seconds count from the beginning of the load."""

    @property
    def left(self) -> int:
        """Requests that have not been submitted."""

    def due(self, seconds: float, unfinished: int) -> list[float]:
        """Those that are to be submitted now, by the times at which they were due; they count as submitted.

        Args:
            unfinished: requests that were submitted and have not ended.
        """

    def next_seconds(self) -> float | None:
        """When the next one is due if nothing ends before; None if that depends on ends alone."""


class Concurrent:
    """A fixed number of unfinished requests."""

    def __init__(self, total: int, concurrency: int) -> None:
        self.left = total
        self._concurrency = concurrency

    def due(self, seconds: float, unfinished: int) -> list[float]:
        count = min(self.left, max(0, self._concurrency - unfinished))
        self.left -= count
        return [seconds] * count

    def next_seconds(self) -> float | None:
        return None


class AtTimes:
    """Arrivals at given times, ascending, whatever becomes of the requests before."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._times = list(seconds)[::-1]

    @property
    def left(self) -> int:
        return len(self._times)

    def due(self, seconds: float, unfinished: int) -> list[float]:
        due = []
        while self._times and self._times[-1] <= seconds:
            due.append(self._times.pop())
        return due

    def next_seconds(self) -> float | None:
        return self._times[-1] if self._times else None
