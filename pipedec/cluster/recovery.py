"""A budget of restarts: limits how often lost ranks are replaced."""

from __future__ import annotations

import time

from pipedec.config import Cluster


class Restarts:
    """Counts the ranks that were replaced lately."""

    def __init__(self, settings: Cluster) -> None:
        self._settings = settings
        self._times: list[float] = []  # on the monotonic clock

    def allow(self, count: int) -> bool:
        """Whether so many more ranks may be replaced now; if so, they count."""
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
