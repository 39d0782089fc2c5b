"""A budget of restarts: limits how often lost ranks are replaced, and separates losses from their consequences."""

from __future__ import annotations

import time
from collections.abc import Iterable

from pipedec.config import Cluster


class Restarts:
    """Counts the losses after which ranks were replaced lately."""

    def __init__(self, settings: Cluster) -> None:
        self._settings = settings
        self._times: list[float] = []  # on the monotonic clock

    def allow(self, count: int) -> bool:
        """Whether ranks may be replaced now, after so many more losses; if so, these count."""
        now = time.monotonic()
        self._times = [one for one in self._times if one > now - self._settings.restart_window]
        if not self._settings.recovers or len(self._times) + count > self._settings.max_restarts:
            return False
        self._times += [now] * count
        return True

    @property
    def used(self) -> str:
        """How much of the budget is used, in words."""
        return f"{len(self._times)} of {self._settings.max_restarts} restarts within {self._settings.restart_window:.0f} s"

    @property
    def refusal(self) -> str:
        """Why no more are replaced, to be appended to what happened; empty if none ever are."""
        if not self._settings.recovers:
            return ""
        count, settings = len(self._times), self._settings
        return (
            f"; {count} rank{'' if count == 1 else 's'} had been replaced within {settings.restart_window:.0f} s "
            f"(--max-restarts {settings.max_restarts})"
        )


class RankLosses:
    """Which ranks may have ended because another one was lost, here or on another host.

    Args:
        seconds: how long after a loss those end that end because of it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: float | None = None  # when the last loss was noted, until the run is served again; monotonic
        self._served: set[int] = set()

    def note(self) -> None:
        """A rank was lost."""
        self._last = time.monotonic()

    def settle(self, ranks: Iterable[int]) -> None:
        """The run is served, by the present processes of ``ranks``."""
        self._last = None
        self._served.update(ranks)

    def forget(self, rank: int) -> None:
        """The rank has another process now. What has never served answers for itself, or it might fail without end."""
        self._served.discard(rank)

    def explain(self, rank: int) -> bool:
        """Whether a rank that has just ended may have done so because of the last loss."""
        return self._last is not None and rank in self._served and time.monotonic() < self._last + self._seconds
