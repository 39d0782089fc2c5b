"""Rank 0's clock: how long a timestep takes, how long of it rank 0 waits for the stages, how long each draft forward takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipedec.decoding import Beat


class BeatClock:
    """Measures one timestep after another."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A timestep begins now; discard what was measured before."""
        self._began = time.perf_counter()
        self._paused: float | None = None
        self._waited = 0.0
        self._forwards: list[float] = []

    def lap(self) -> Beat:
        """End the current timestep, return its timing and begin the next timestep."""
        self.resume()
        beat = Beat(time.perf_counter() - self._began, self._waited, tuple(self._forwards))
        self.restart()
        return beat

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Measure a draft forward."""
        began = time.perf_counter()
        yield
        self._forwards.append(time.perf_counter() - began)

    def pause(self) -> None:
        """Rank 0 begins to wait, until ``resume``."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        if self._paused is not None:
            self._waited += time.perf_counter() - self._paused
            self._paused = None
