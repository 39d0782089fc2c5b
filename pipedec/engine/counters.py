"""The counters of a running request."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipedec.core import Metrics, Opening, Step
from pipedec.decoding import RequestState
from pipedec.engine.draft_tokens import DraftTokens


class Counters:
    """Fills ``metrics`` while a request runs. Timesteps are counted from the first verdict on, which ends prefill.

    Args:
        now: the time in seconds; that of emulated devices where times are computed.
    """

    def __init__(self, metrics: Metrics, now: Callable[[], float] = time.perf_counter) -> None:
        self.metrics = metrics
        self._now = now
        self._draft_tokens = DraftTokens()
        self._began = now()
        self._prefilled: tuple[int, float] | None = None  # timestep and time of the first verdict
        self._openings = 0

    def waits(self) -> None:
        """The request has no KV memory."""
        self.metrics.pauses += self._openings > 0

    def opened(self, opening: Opening) -> int:
        """The request begins, or goes on after a pause. Returns how often it was opened."""
        self._openings += 1
        if self._openings == 1:
            self.metrics.cached_tokens = min(opening.cached, opening.prompt_length)
        return self._openings

    def entered(self, step: Step) -> None:
        """Rows of the request enter the pipeline."""
        if self._prefilled is not None:
            self._draft_tokens.count(step)

    def accepted(self, timestep: int) -> None:
        """Tokens were accepted in ``timestep``."""
        now = self._now()
        if self._prefilled is None:
            self._prefilled = timestep, now
        first, prefilled = self._prefilled
        self.metrics.timesteps = timestep - first
        self.metrics.prefill_seconds = prefilled - self._began
        self.metrics.decode_seconds = now - prefilled

    def ended(self, method: RequestState) -> None:
        """The request has ended; ``method`` has followed its last verdict. Waits for the device of the draft model."""
        self.metrics.hits, self.metrics.misses = method.hits, method.misses
        self.metrics.draft_tokens = self._draft_tokens.total()
