"""The passage: how many timesteps a row needs from its entry to its verdict, in groups of stages and on the links between them.

While links are short against a timestep, that is the number of groups. On slow links more timesteps must be in flight, or every
one of them waits for a link. But then each guess is older, and each timestep leaves less time to draft: a few timesteps with many levels of the tree cost less
than many with one. So it begins with timesteps that leave time for several levels, and then lengths are tried: the time per token
with one passage and with the next longer or shorter one. Knows no tokens, trees or links.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from pipedec.core import MAX_PASSAGE

_USUAL_SECONDS = 0.05  # of a timestep in which a draft model has time for several levels of the tree
_LEAST_SECONDS = 0.004  # of a timestep: a shorter one leaves no time to draft
_STEP = 1.4  # between two lengths that are tried
_WINDOW = 16  # tokens of a measurement, by request
_BETTER = 1.05  # factor by which another length must be better
_FIRST = 32  # tokens between trials at first, by request
_MAX_INTERVAL = 2048
_GROWTH = 1.5
_WEIGHT = 0.4  # of a new measurement
_MEMORY = 1024.0  # tokens after which what was counted counts half
_PRIOR = 64.0  # tokens after which a length's own misses count as much as those of all lengths


@dataclass
class Misses:
    """Misses among tokens; older ones count less."""

    tokens: float = 0.0
    misses: float = 0.0

    def record(self, tokens: float, misses: float) -> None:
        self.tokens, self.misses = self.tokens + tokens, self.misses + misses
        if self.tokens > _MEMORY:
            self.tokens, self.misses = self.tokens / 2, self.misses / 2

    def rate(self, prior: float) -> float:
        return (self.misses + _PRIOR * prior) / (self.tokens + _PRIOR)


@dataclass
class Measured:
    """What was measured with one length, as moving averages over windows."""

    seconds: float  # of a timestep
    timesteps: float  # of a request for a token, but for those in which it waits after a miss

    def record(self, seconds: float, timesteps: float) -> None:
        self.seconds += _WEIGHT * (seconds - self.seconds)
        self.timesteps += _WEIGHT * (timesteps - self.timesteps)


class Passages:
    """Owns ``length``, the passage for requests that keep the pipeline full; never less than ``least``, the default.

    A token takes t · (a + m · (W - 1)) seconds with timesteps of t seconds, a of which a request needs for a token, and with m
    misses per token, each of which costs the rest of a passage W. Of the three m varies most from text to text and least with W.
    So it is counted over many tokens of all lengths, and a trial of few tokens tells two lengths apart.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._lengths = [least]  # that may be tried, ascending
        self._home = self._tried = 0  # indices of them: the best so far, and the present one
        self._direction = 1
        self._interval = float(_FIRST)
        self._measured: dict[int, Measured] = {}
        self._misses: dict[int, Misses] = {}
        self._all_misses = Misses()
        self._stalls: list[int] = []  # timesteps that requests still wait after a miss
        self._load = 0  # binary digits of the number of running requests
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
        begin = round(latency / _USUAL_SECONDS) if learned is None else learned
        self._home = self._tried = min(bisect_left(self._lengths, begin), len(self._lengths) - 1)
        self._measured, self._misses, self._interval = {}, {}, float(_FIRST)
        self._begin()

    def _begin(self) -> None:
        """Measure from now on, but not the timesteps that are in flight."""
        self._unsettled = self.length
        self._begin_window()

    def _begin_window(self) -> None:
        self._waited = self._tokens = self._seconds = self._productive = 0.0  # tokens and timesteps by request
        self._timesteps = self._window_misses = 0

    def record(self, seconds: float, tokens: int, misses: int, running: int, counts: bool = True) -> None:
        """Record a timestep of ``seconds``: its verdicts accepted ``tokens`` of ``running`` requests, and ``misses`` of them left
        no rows in flight. It is no measure of a length unless it ``counts``.
        """
        if len(self._lengths) == 1:
            return
        stalled = min(len(self._stalls), running)
        self._stalls = [left - 1 for left in self._stalls if left > 1] + [self.length - 1] * misses
        if not counts:
            return
        if running.bit_length() != self._load:
            self._load, self._tried, self._measured = running.bit_length(), self._home, {}
            self._begin()
        if self._unsettled:
            self._unsettled -= 1
            return
        self._tokens += tokens / running
        self._seconds += seconds
        self._timesteps += 1
        self._productive += 1 - stalled / running
        self._window_misses += misses
        if self._tokens < _WINDOW:
            return
        self._end_window(running)
        if self.is_trying:
            self._judge()
        elif self._waited >= self._interval:
            self._tried = self._neighbour()
            self._begin()

    def _end_window(self, running: int) -> None:
        length, tokens = self.length, self._tokens
        seconds, timesteps = self._seconds / self._timesteps, self._productive / tokens
        if length in self._measured:
            self._measured[length].record(seconds, timesteps)
        else:
            self._measured[length] = Measured(seconds, timesteps)
        for misses in (self._misses.setdefault(length, Misses()), self._all_misses):
            misses.record(tokens, self._window_misses / running)
        waited = self._waited + tokens
        self._begin_window()
        self._waited = waited

    def _token_seconds(self, index: int) -> float:
        """The time per token and request with one of the lengths that were measured."""
        length, of_all = self._lengths[index], self._all_misses
        measured = self._measured[length]
        misses = self._misses[length].rate(of_all.misses / of_all.tokens)
        return measured.seconds * (measured.timesteps + misses * (length - 1))

    def _judge(self) -> None:
        """End a trial: stay with the better length, and go on in its direction."""
        if _BETTER * self._token_seconds(self._tried) < self._token_seconds(self._home):
            self._home, self._interval = self._tried, float(_FIRST)
        else:
            self._tried, self._direction = self._home, -self._direction
            self._interval = min(self._interval * _GROWTH, _MAX_INTERVAL)
        self._begin()

    def _neighbour(self) -> int:
        """The next length in the present direction; at an end, in the other one."""
        if not 0 <= self._home + self._direction < len(self._lengths):
            self._direction = -self._direction
        return self._home + self._direction
