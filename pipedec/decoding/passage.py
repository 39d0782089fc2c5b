"""The passage: how many timesteps a row needs from its entry to its verdict, in groups of stages and on the links between them.

While links are short against a timestep, that is the number of groups. On slow links more timesteps must be in flight, or every
one of them waits for a link. But then each guess is older, and each timestep leaves less time to draft. So what counts is tried:
tokens per second with one passage and with the next longer or shorter one. Knows no tokens, trees or links.
"""

from __future__ import annotations

from bisect import bisect_left

from pipedec.core import MAX_PASSAGE

_USUAL_SECONDS = 0.02  # of a timestep, before any was measured
_LEAST_SECONDS = 0.004  # of a timestep: a shorter one leaves no time to draft
_STEP = 1.25  # between two lengths that are tried
_WINDOW = 24  # tokens of a measurement, by request
_BETTER = 1.05  # factor by which another length must be better
_FIRST = 48  # tokens between trials at first, by request
_MAX_INTERVAL = 2048
_GROWTH = 1.5
_WEIGHT = 0.4  # of a new measurement


class Passages:
    """Owns ``length``, the passage for requests that keep the pipeline full; never less than ``least``, the default."""

    def __init__(self, least: int) -> None:
        self.least = least
        self._lengths = [least]  # that may be tried, ascending
        self._home = self._tried = 0  # indices of them: the best so far, and the present one
        self._direction = 1
        self._interval = float(_FIRST)
        self._rates: dict[int, float] = {}  # tokens per second and running request
        self._begin()

    @property
    def length(self) -> int:
        return self._lengths[self._tried]

    @property
    def best(self) -> int:
        """The best length so far."""
        return self._lengths[self._home]

    @property
    def is_trying(self) -> bool:
        return self._tried != self._home

    def fill(self, latency: float, learned: int | None = None) -> None:
        """Try lengths that fill links of ``latency`` seconds altogether, around the ring; the first is near ``learned``, if an
        earlier process has found one.
        """
        most = min(self.least + int(latency / _LEAST_SECONDS), MAX_PASSAGE)
        self._lengths = [self.least]
        while self._lengths[-1] < most:
            self._lengths.append(min(max(self._lengths[-1] + 1, round(_STEP * self._lengths[-1])), most))
        begin = self.least + round(latency / _USUAL_SECONDS) if learned is None else learned
        self._home = self._tried = min(bisect_left(self._lengths, begin), len(self._lengths) - 1)
        self._rates, self._interval = {}, float(_FIRST)
        self._begin()

    def _begin(self) -> None:
        """Measure from now on, but not the timesteps that are in flight."""
        self._unsettled = self.length
        self._waited = self._tokens = self._seconds = 0.0  # tokens by request

    def record(self, seconds: float, tokens: int, running: int) -> None:
        """Record a timestep of ``seconds`` whose verdicts accepted ``tokens`` of ``running`` requests, with no prompt in it."""
        if len(self._lengths) == 1:
            return
        if self._unsettled:
            self._unsettled -= 1
            return
        if not self.is_trying and self._waited < self._interval - _WINDOW:
            self._waited += tokens / running
            return
        self._tokens += tokens / running
        self._seconds += seconds
        if self._tokens < _WINDOW:
            return
        rate, length = self._tokens / max(self._seconds, 1e-9), self._tried
        self._rates[length] = rate if length not in self._rates else self._rates[length] + _WEIGHT * (rate - self._rates[length])
        if self.is_trying:
            self._judge()
        else:
            self._tried = self._neighbour()
        self._begin()

    def _judge(self) -> None:
        """End a trial: stay with the better length, and go on in its direction."""
        if self._rates[self._tried] > _BETTER * self._rates[self._home]:
            self._home, self._interval = self._tried, float(_FIRST)
        else:
            self._tried, self._direction = self._home, -self._direction
            self._interval = min(self._interval * _GROWTH, _MAX_INTERVAL)

    def _neighbour(self) -> int:
        """The next length in the present direction; at an end, in the other one."""
        if not 0 <= self._home + self._direction < len(self._lengths):
            self._direction = -self._direction
        return self._home + self._direction
