"""The passage: how many timesteps a row needs from its entry to its verdict, in groups of stages and on the links between them.

While links are short against a timestep, that is the number of groups. On slow links more timesteps must be in flight, or every
one of them waits for a link. But then each guess is older, and each timestep leaves less time to draft: a few timesteps with many
levels of the tree cost less than many with one. So it begins with timesteps that leave time for several levels, and then lengths
are tried: the time per token with one passage and with the next longer or shorter one. Knows no tokens, trees or links.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipedec.core.limits import MAX_PASSAGE

_USUAL_SECONDS = 0.05  # of a timestep in which a draft model has time for several levels of the tree
_LEAST_SECONDS = 0.004  # of a timestep: a shorter one leaves no time to draft
_LEAST_SHARE = 1 / 3  # of the time of a passage, for which links must be the reason if a longer one is tried
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
    """Moving averages over windows in which the passage was the same."""

    seconds: float  # of a timestep
    timesteps: float  # of a request for a token, but for those in which it waits after a miss

    def record(self, seconds: float, timesteps: float) -> None:
        self.seconds += _WEIGHT * (seconds - self.seconds)
        self.timesteps += _WEIGHT * (timesteps - self.timesteps)


class Search:
    """The best of ``lengths``, ascending, with one load: a walk from one to the next."""

    def __init__(self, lengths: Sequence[int], begin: float) -> None:
        self._lengths = lengths
        self.home = min(bisect_left(lengths, begin), len(lengths) - 1)  # index of the best so far
        self.tried = self.home  # and of the present one
        self.measured: dict[int, Measured] = {}  # by length
        self._direction = 1
        self._interval = float(_FIRST)
        self._waited = 0.0  # tokens since the last trial, by request

    @property
    def length(self) -> int:
        return self._lengths[self.tried]

    @property
    def is_trying(self) -> bool:
        return self.tried != self.home

    def step(self, tokens: float, token_seconds: Callable[[int], float], may_be_longer: bool) -> None:
        """After a window of ``tokens``, end a trial with the better length, or begin one if it is time."""
        if self.is_trying:
            if _BETTER * token_seconds(self.length) < token_seconds(self._lengths[self.home]):
                self.home, self._interval = self.tried, float(_FIRST)
            else:
                self.tried, self._direction = self.home, -self._direction
                self._interval = min(self._interval * _GROWTH, _MAX_INTERVAL)
            self._waited = 0.0
            return
        self._waited += tokens
        if self._waited >= self._interval:
            longest = len(self._lengths) - 1 if may_be_longer else self.home
            if not 0 <= self.home + self._direction <= longest:
                self._direction = -self._direction
            self.tried = min(max(self.home + self._direction, 0), longest)


class Passages:
    """Owns ``length``, the passage for requests that keep the pipeline full; never less than ``least``, the default.

    A token takes t · (a + m · (W - 1)) seconds with timesteps of t seconds, a of which a request needs for a token, and with m
    misses per token, each of which costs the rest of a passage W. Of the three m varies most from text to text and least with W:
    it is counted over many tokens, for all W, which leaves trials short. One request and several, by powers of two, have a
    length of their own.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._all_misses = Misses()
        self._stalls: list[int] = []  # timesteps that requests still wait after a miss
        self.fill(0.0)

    @property
    def length(self) -> int:
        return self._search.length

    @property
    def best(self) -> int:
        """The best length so far for a single request."""
        return self._lengths[self._searches[1].home]

    @property
    def is_trying(self) -> bool:
        return self._search.is_trying

    def fill(self, latency: float, learned: int | None = None) -> None:
        """Try lengths that fill links of ``latency`` seconds altogether, around the ring. A single request begins near
        ``learned``, if an earlier process has found that; several fill the timesteps of each other.
        """
        most = min(self.least + int(latency / _LEAST_SECONDS), MAX_PASSAGE)
        self._lengths = [self.least]
        while self._lengths[-1] < most:
            self._lengths.append(min(max(self._lengths[-1] + 1, round(_STEP * self._lengths[-1])), most))
        self._latency, self._fills = latency, latency / _USUAL_SECONDS
        self._misses: dict[int, Misses] = {}  # by length
        self._searches = {1: Search(self._lengths, self._fills if learned is None else learned)}  # by load
        self._begin(1)

    def _begin(self, load: int) -> None:
        """Measure with ``load`` from now on, but not the timesteps that are in flight."""
        if load not in self._searches:
            self._searches[load] = Search(self._lengths, self.least + self._fills)
        self._load, self._search = load, self._searches[load]
        self._unsettled = self.length
        self._begin_window()

    def _begin_window(self) -> None:
        self._tokens = self._seconds = self._productive = 0.0  # tokens and timesteps by request
        self._timesteps = self._window_misses = 0

    def record(self, seconds: float, tokens: int, misses: int, running: int, counts: bool = True) -> None:
        """Record a timestep of ``seconds``: its verdicts accepted ``tokens`` of ``running`` requests, and ``misses`` of them left
        no rows in flight. It is no measure of a length unless it ``counts``.
        """
        if len(self._lengths) == 1:
            return
        stalled = min(len(self._stalls), running)
        self._stalls = [left - 1 for left in self._stalls if left > 1] + [self.length - 1] * misses
        if running.bit_length() != self._load:
            self._begin(running.bit_length())
        if not counts:
            return
        if self._unsettled:
            self._unsettled -= 1
            return
        self._tokens += tokens / running
        self._seconds += seconds
        self._timesteps += 1
        self._productive += 1 - stalled / running
        self._window_misses += misses
        if self._tokens >= _WINDOW:
            self._end_window(running)

    def _end_window(self, running: int) -> None:
        length, tokens, search = self.length, self._tokens, self._search
        seconds, timesteps = self._seconds / self._timesteps, self._productive / tokens
        measured = search.measured.setdefault(length, Measured(seconds, timesteps))
        measured.record(seconds, timesteps)
        for misses in (self._misses.setdefault(length, Misses()), self._all_misses):
            misses.record(tokens, self._window_misses / running)
        search.step(tokens, self._token_seconds, self._latency > _LEAST_SHARE * measured.seconds * length)
        if search.length == length:
            self._begin_window()
        else:
            self._begin(self._load)

    def _token_seconds(self, length: int) -> float:
        """The time per token and request with a length that was measured."""
        measured = self._search.measured[length]
        misses = self._misses[length].rate(self._all_misses.misses / self._all_misses.tokens)
        return measured.seconds * (measured.timesteps + misses * (length - 1))
