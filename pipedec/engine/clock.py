"""Rank 0's stopwatch: what a timestep takes, how long of it rank 0 waits for the stages, and how long each draft forward is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipedec.decoding import Beat


class BeatClock:
    """Laps from one timestep to the next."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A lap begins now; nothing before counts."""
        self._began = time.perf_counter()
        self._paused: float | None = None
        self._waited = 0.0
        self._forwards: list[float] = []

    def lap(self) -> Beat:
        """The lap that ends now, and begin the next."""
        self.resume()
        beat = Beat(time.perf_counter() - self._began, self._waited, tuple(self._forwards))
        self.restart()
        return beat

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a draft forward."""
        began = time.perf_counter()
        yield
        self._forwards.append(time.perf_counter() - began)

    def pause(self) -> None:
        """Waiting begins, until ``resume``."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        if self._paused is not None:
            self._waited += time.perf_counter() - self._paused
            self._paused = None
