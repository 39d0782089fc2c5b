"""What a rank does at this moment: told by its thread, and asked by another one, which may also tell it to stop doing so."""

from __future__ import annotations

import time
from typing import NamedTuple

from pipedec.core import PipedecError
from pipedec.messages import Activity


class _Doing(NamedTuple):
    kind: str
    peer: int | None
    since: float


class Doing:
    """A rank is idle, or computes, loads or meets others, or waits for a peer; whatever it begins ends what it did before."""

    def __init__(self) -> None:
        self._now = _Doing("idle", None, time.monotonic())
        self._longest_seconds = 0.0
        self._interruption: PipedecError | None = None

    def begin(self, kind: str, peer: int | None = None) -> None:
        """The rank begins to do this, also if it did the same before. Raises what ``interrupt`` has been given."""
        if self._interruption is not None:
            raise self._interruption
        before, now = self._now, time.monotonic()
        self._now = _Doing(kind, peer, now)
        if before.kind == "computing":
            self._longest_seconds = max(self._longest_seconds, now - before.since)

    def activity(self) -> Activity:
        """What it does, and for how long it has done so. For any thread."""
        now = self._now
        return Activity(now.kind, now.peer, time.monotonic() - now.since, self._longest_seconds)

    def interrupt(self, reason: PipedecError) -> None:
        """Whatever the rank begins next raises ``reason``, until ``meet_again``. For any thread."""
        self._interruption = reason

    def meet_again(self) -> None:
        """What was interrupted is over: the rank waits for others and meets them."""
        self._interruption = None
        self._now = _Doing("meeting", None, time.monotonic())
