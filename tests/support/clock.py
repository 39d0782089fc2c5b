"""A monotonic clock that tests put forward, so that what takes minutes is over at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Clock:
    """Stands for ``time.monotonic`` until the test ends: goes on as usual, and jumps ahead.

    Threads that other tests have started keep the real one. The event loop of a server that tests share would otherwise sleep
    until the hour that it was once shown.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead = 0.0
        real = time.monotonic
        others = {*threading.enumerate()} - {threading.current_thread()}  # no numbers, which later threads may get again
        monkeypatch.setattr(time, "monotonic", lambda: real() + (0.0 if threading.current_thread() in others else self._ahead))

    @contextmanager
    def halted(self) -> Iterator[None]:
        """What happens in the context takes no time."""
        began = time.monotonic()
        yield
        self.advance(began - time.monotonic())

    def advance(self, seconds: float) -> None:
        self._ahead += seconds
