"""The record of one timestep, to which everything listens that watches the loop: counters, clocks, traces, tuning.

A ``Recorder`` on each rank times the pieces of the rank's work. On an emulated device it makes them last as long as there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from pipedec.core import EMPTY, NO_LOAD, Envelope, Load, Update
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
        number: counted from 1; in task dispatch 0 and less in prefill.
        entered: rank 0: what entered the pipeline.
        results: rank 0: what the last stage said of the rows of the oldest timestep in flight.
        timing: rank 0: how long the timestep took; None while the pipeline fills.
        load: the rows of every rank, if all are in this process.
        spans: the pieces of the rank's work.
        overran: work took longer than on the emulated device.
    """

    number: int
    entered: Envelope = EMPTY
    results: tuple[Update, ...] = ()
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
        self._own_began = time.thread_time()
        self._drafting = 0.0  # CPU time of the draft forwards
        self._waited = 0.0
        self._forwards: list[tuple[Load, float]] = []  # each draft forward and its seconds

    @contextmanager
    def span(self, label: str, category: str, load: Load = NO_LOAD) -> Iterator[None]:
        """Record the body of the ``with`` statement. If it computes rows, it lasts as long as on the emulated device."""
        began = time.perf_counter()
        with self.computing(load):
            yield
        self.add(label, category, began)

    def add(self, label: str, category: str, began: float) -> None:
        """Record a span that ends now."""
        self._spans.append(Span(label, category, began, time.perf_counter()))

    @contextmanager
    def drafting(self, load: Load) -> Iterator[None]:
        """One draft forward."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        with self.computing(load):
            yield
        self._forwards.append((load, time.perf_counter() - began))
        self._drafting += time.thread_time() - cpu_began

    @property
    def cpu_seconds(self) -> float:
        """What this thread has computed since ``restart``, on a CPU that others may be using at the same time."""
        return time.thread_time() - self._own_began

    @contextmanager
    def beside(self, load: TimestepLoad) -> Iterator[None]:
        """A timestep begins with rank 0's work beside the stages'; it is put into ``load``, the draft forwards apart."""
        self.restart()
        yield
        load.drafted = [forward for forward, _ in self._forwards]
        load.beside_seconds = self.cpu_seconds - self._drafting

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

    def computing(self, load: Load) -> AbstractContextManager[None]:
        """The body lasts as long as ``load`` takes on the emulated device."""
        return self.pacer.computing(load) if load.rows and self.pacer.is_emulating else nullcontext()
