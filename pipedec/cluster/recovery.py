"""How a run recovers from the loss of ranks: what users may choose, and how often it has been made use of."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class RecoveryOptions:
    """Limits of recovery.

    Attributes:
        max_restarts: most ranks that are replaced within ``window_seconds``; one more ends the run. 0: the first loss ends it.
        stall_seconds: a rank that computes for longer, or a link over which nothing arrives for longer while a timestep is
            under way, counts as lost.
    """

    max_restarts: int = 5
    window_seconds: float = 300.0
    stall_seconds: float = 4.0

    @property
    def recovers(self) -> bool:
        """Whether ranks are replaced at all."""
        return self.max_restarts > 0


USUAL_RECOVERY = RecoveryOptions()


class Restarts:
    """Counts the ranks that were replaced lately."""

    def __init__(self, options: RecoveryOptions) -> None:
        self._options = options
        self._times: list[float] = []  # on the monotonic clock

    def allow(self, count: int) -> bool:
        """Whether so many more ranks may be replaced now; if so, they count."""
        now = time.monotonic()
        self._times = [one for one in self._times if one > now - self._options.window_seconds]
        if not self._options.recovers or len(self._times) + count > self._options.max_restarts:
            return False
        self._times += [now] * count
        return True

    @property
    def refusal(self) -> str:
        """Why no more are replaced, to be appended to what happened; empty if none ever are."""
        if not self._options.recovers:
            return ""
        count, options = len(self._times), self._options
        return (
            f"; {count} rank{'' if count == 1 else 's'} had been replaced within {options.window_seconds:.0f} s "
            f"(--max-restarts {options.max_restarts})"
        )
