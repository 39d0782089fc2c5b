"""What a rank does at this moment: told by its thread, and asked by another one, which may also tell it to stop doing so."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pipedec.core import PipedecError
from pipedec.messages import Activity

_FIRST_TIMESTEPS = 3  # of an epoch: they may take as long as a warm-up
_SLOW_SECONDS, _SLOWER = 0.2, 4.0  # a timestep is slow if it takes at least so long, and so many times as long as usual
_RECENT = 16  # timesteps, of whose times the usual one is an average
_LOG_SECONDS = 1.0  # from one line about slow timesteps to the next
logger = logging.getLogger(__name__)


class _Doing(NamedTuple):
    kind: str
    peer: int | None
    since: float


class Doing:
    """A rank is idle, or computes, loads, warms up or meets others, or waits for a peer; whatever it begins ends what it did
    before. In the first timesteps after ``meet_again`` it counts as warming up while it computes.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._unusual_timesteps = 0  # of the first ones, those that are not over
        self._warmed: float | None = None  # when it was warming last
        self._now = _Doing("idle", None, time.monotonic())
        self._longest_seconds = 0.0
        self._usual_seconds = 0.0  # of a timestep
        self._logged = 0.0  # when a slow timestep was logged last
        self._interruption: PipedecError | None = None

    def begin(self, kind: str, peer: int | None = None) -> None:
        """The rank begins to do this, also if it did the same before. Raises what ``interrupt`` has been given."""
        if self._interruption is not None:
            raise self._interruption
        self._begin("warming" if kind == "computing" and self._unusual_timesteps else kind, peer)

    @contextmanager
    def warming(self) -> Iterator[None]:
        """In the context the rank computes what may take long because it is computed for the first time; then it goes on as
        before. Raises nothing of its own. In another thread than the rank's it says nothing: the rank does something else.
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
        """A timestep is over."""
        self._unusual_timesteps = max(self._unusual_timesteps - 1, 0)

    def _begin(self, kind: str, peer: int | None) -> None:
        before, now = self._now, time.monotonic()
        if before.kind == "warming":
            self._warmed = now
        self._now = _Doing(kind, peer, now)
        if before.kind == "computing":
            self._count_seconds(now - before.since, now)

    def _count_seconds(self, seconds: float, now: float) -> None:
        """A timestep was computed in so many seconds."""
        self._longest_seconds = max(self._longest_seconds, seconds)
        usual = self._usual_seconds or seconds
        if seconds > max(_SLOW_SECONDS, _SLOWER * usual) and now > self._logged + _LOG_SECONDS:
            self._logged = now
            logger.info("slow timestep: computed for %.2f s, usually %.3f s", seconds, usual)
        self._usual_seconds = usual + (seconds - usual) / _RECENT

    def activity(self) -> Activity:
        """What it does, and for how long it has done so. For any thread."""
        doing, warmed, now = self._now, self._warmed, time.monotonic()
        ago = None if warmed is None else now - warmed
        return Activity(doing.kind, doing.peer, now - doing.since, self._longest_seconds, ago)

    def interrupt(self, reason: PipedecError) -> None:
        """Whatever the rank begins next raises ``reason``, until ``meet_again``. For any thread."""
        self._interruption = reason

    def meet_again(self) -> None:
        """What was interrupted is over: the rank waits for others and meets them."""
        self._interruption = None
        self._unusual_timesteps = _FIRST_TIMESTEPS
        self._now = _Doing("meeting", None, time.monotonic())
