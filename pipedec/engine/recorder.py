"""The record of one timestep, to which everything listens that watches the loop: counters, clocks, traces, tuning.

A ``Recorder`` on each rank times the pieces of the rank's work. On an emulated device it makes them last as long as there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from pipedec.core import Step, Verdict
from pipedec.decoding import TimestepTiming
from pipedec.engine.emulated_time import Pacer, TimestepLoad


class Span(NamedTuple):
    """A piece of a rank's work, as traces show it. Times are seconds of ``time.perf_counter``."""

    label: str
    category: str
    began: float
    ended: float


@dataclass(frozen=True)
class Timestep:
    """What happened on one rank in one timestep.

    Attributes:
        number: counted from 1; 0 and less in prefill.
        step: rank 0: the rows that entered the pipeline.
        verdict: rank 0: the result of the oldest timestep in flight; None if no token was accepted.
        timing: rank 0: how long the timestep took; None while the pipeline fills.
        load: the rows of every rank, if all are in this process.
        spans: the pieces of the rank's work.
        overran: work took longer than on the emulated device.
    """

    number: int
    step: Step | None = None
    verdict: Verdict | None = None
    timing: TimestepTiming | None = None
    load: TimestepLoad | None = None
    spans: tuple[Span, ...] = ()
    overran: bool = False


class Recorder:
    """Times one rank's work.

    Args:
        pacer: of the rank's emulated device.
    """

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self._spans: list[Span] = []
        self.restart()

    def restart(self) -> None:
        """A timestep begins now; what was measured of the current one is discarded."""
        self._began = time.perf_counter()
        self._waited = 0.0
        self._forwards: list[tuple[int, float]] = []  # rows and seconds of each draft forward

    @contextmanager
    def span(self, label: str, category: str, rows: int = 0) -> Iterator[None]:
        """Record the body of the ``with`` statement. If it computes ``rows`` rows, it lasts as long as on the emulated device."""
        began = time.perf_counter()
        with self.computing(rows):
            yield
        self.add(label, category, began)

    def add(self, label: str, category: str, began: float) -> None:
        """Record a span that ends now."""
        self._spans.append(Span(label, category, began, time.perf_counter()))

    @contextmanager
    def drafting(self, rows: int) -> Iterator[None]:
        """One draft forward."""
        began = time.perf_counter()
        with self.computing(rows):
            yield
        self._forwards.append((rows, time.perf_counter() - began))

    @property
    def drafted(self) -> list[int]:
        """Rows of each draft forward of the timestep."""
        return [rows for rows, _ in self._forwards]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The rank has nothing to do."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def timing(self) -> TimestepTiming:
        """The timing of the timestep that ends now. The next one begins."""
        forwards = tuple(seconds for _, seconds in self._forwards)
        timing = TimestepTiming(time.perf_counter() - self._began, self._waited, forwards)
        self.restart()
        return timing

    def take_spans(self) -> tuple[Span, ...]:
        """The spans since the last call."""
        spans, self._spans = tuple(self._spans), []
        return spans

    def computing(self, rows: int) -> AbstractContextManager[None]:
        """The body lasts as long as ``rows`` rows take on the emulated device."""
        return self.pacer.computing(rows) if rows and self.pacer.is_emulating else nullcontext()
