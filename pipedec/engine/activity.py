"""The current activity of a rank: set by its own thread, read by another one, which may also interrupt it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pipedec.core.errors import PipedecError
from pipedec.messages.stats import ActivityReport

_FIRST_TIMESTEPS = 3  # of an epoch: they may take as long as a warm-up
_SLOW_SECONDS, _SLOWER = 0.2, 4.0  # a slow timestep takes at least this long, and this many times the usual duration
_RECENT = 16  # timesteps averaged for the usual duration
_LOG_SECONDS = 1.0  # between two log lines about slow timesteps
logger = logging.getLogger(__name__)


class _Current(NamedTuple):
    kind: str
    peer: int | None
    since: float


class Activity:
    """One rank's activity, of the kinds of ``ActivityReport``: beginning one ends the other. In the first timesteps after
    ``meet_again``, computing counts as warming up.

    Attributes:
        link_seconds: the latency of this rank's link to the next one, as measured when they met; 0 if all are on one machine.
    """

    def __init__(self) -> None:
        self.link_seconds = 0.0
        self._thread = threading.get_ident()
        self._unusual_timesteps = 0  # first timesteps that are still to come
        self._warmed: float | None = None  # when warming ended last
        self._now = _Current("idle", None, time.monotonic())
        self._longest_seconds = 0.0
        self._usual_seconds = 0.0  # of a timestep
        self._logged = 0.0  # when a slow timestep was logged last
        self._interruption: PipedecError | None = None

    def begin(self, kind: str, peer: int | None = None) -> None:
        """Begin an activity, possibly the same as before. Raises the reason given to ``interrupt``."""
        if self._interruption is not None:
            raise self._interruption
        self._begin("warming" if kind == "computing" and self._unusual_timesteps else kind, peer)

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Context in which the rank computes something for the first time, which may take long; afterwards the activity before
        continues. Does not raise the reason of ``interrupt``. No effect in other threads than the rank's.
        """
        if threading.get_ident() != self._thread:
            yield
            return
        before = self._now
        self._begin("warming", None)
        try:
            yield
        finally:
            self._begin(before.kind, before.peer)

    def count_timestep(self) -> None:
        """Record the end of a timestep."""
        self._unusual_timesteps = max(self._unusual_timesteps - 1, 0)

    def _begin(self, kind: str, peer: int | None) -> None:
        before, now = self._now, time.monotonic()
        if before.kind == "warming":
            self._warmed = now
        self._now = _Current(kind, peer, now)
        if before.kind == "computing":
            seconds = now - before.since
            self._longest_seconds = max(self._longest_seconds, seconds)
            usual = self._usual_seconds or seconds
            if seconds > max(_SLOW_SECONDS, _SLOWER * usual) and now > self._logged + _LOG_SECONDS:
                self._logged = now
                logger.info("slow timestep: computed for %.2f s, usually %.3f s", seconds, usual)
            self._usual_seconds = usual + (seconds - usual) / _RECENT

    def activity(self) -> ActivityReport:
        """The current activity and how long it has lasted. For any thread."""
        current, warmed, now = self._now, self._warmed, time.monotonic()
        ago = None if warmed is None else now - warmed
        return ActivityReport(current.kind, current.peer, now - current.since, self._longest_seconds, ago, self.link_seconds)

    def interrupt(self, reason: PipedecError) -> None:
        """Make the next call that begins an activity raise ``reason``, until ``meet_again``. For any thread."""
        self._interruption = reason

    def meet_again(self) -> None:
        """End an interruption: the rank waits for the others and meets them."""
        self._interruption = None
        self._unusual_timesteps = _FIRST_TIMESTEPS
        self._now = _Current("meeting", None, time.monotonic())
