"""Rank 0's stopwatch: the duration of a timestep, how much of it rank 0 waits for the stages, and of each draft forward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipedec.decoding import TimestepTiming


class TimestepClock:
    """Times successive timesteps."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start timing a timestep now; discard what has been measured of the current one."""
        self._began = time.perf_counter()
        self._paused: float | None = None
        self._waited = 0.0
        self._forwards: list[float] = []

    def finish_timestep(self) -> TimestepTiming:
        """The timing of the timestep that ends now; the next one starts."""
        self.resume()
        timing = TimestepTiming(time.perf_counter() - self._began, self._waited, tuple(self._forwards))
        self.restart()
        return timing

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Time a draft forward."""
        began = time.perf_counter()
        yield
        self._forwards.append(time.perf_counter() - began)

    def pause(self) -> None:
        """Rank 0 begins to wait for the stages, until ``resume``. The timestep goes on."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Rank 0 stops waiting. Without ``pause`` before, nothing happens."""
        if self._paused is not None:
            self._waited += time.perf_counter() - self._paused
            self._paused = None
