"""The time of a timestep by its rows, learned from measurements and from what the plan expects; and what rows may yield."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf

from pipedec.decoding.learned import MeasuredRows

BOUNDS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # maximum rows of each bucket
_WEIGHT = 0.15  # of a new measurement
_OUTLIER = 2.0  # a measurement counts as at most this many times the mean so far
_MAX_AGE = 4096  # timesteps after which a measurement is forgotten
_FIRST_TRIED = 8  # rows
_REMAINING = 512  # timesteps after which a measurement of an earlier process is forgotten if it is not made again


class RowCosts:
    """The seconds of a timestep as a function of its rows, never falling. Between measurements and outside they grow as what the
    plan expects; where it expects that rows cost nothing, they are linear between measurements, and flat outside.

    Rows are tried from few to many, at most twice as many as were measured: otherwise small steps would stay unmeasured.

    Args:
        expected_ms: by the plan, of a timestep of 1, 2, … rows, never falling; empty if a further row costs nothing, as without
            routed experts. Only ratios count.
    """

    def __init__(self, expected_ms: Sequence[float] = ()) -> None:
        self._expected_ms = expected_ms
        self._measured: dict[int, tuple[float, float, int]] = {}  # by bucket: mean rows and seconds, and the last timestep
        self._timestep = 0
        self._curve: list[tuple[float, float]] | None = None  # rows and seconds, ascending
        self._added: dict[int, float] = {}  # by number of rows, as long as the curve is the same
        self._most_tried = _FIRST_TRIED

    @property
    def learned(self) -> list[MeasuredRows]:
        """The measurements, by ascending rows."""
        self._points()
        found = [self._measured[bucket] for bucket in sorted(self._measured)]
        return [MeasuredRows(rows, seconds, self._timestep - timestep) for rows, seconds, timestep in found]

    def start_from(self, learned: list[MeasuredRows]) -> None:
        """Begin with the measurements of an earlier process."""
        for one in learned:
            age = max(one.age, _MAX_AGE - _REMAINING)
            self._measured[_bucket(one.rows)] = one.rows, one.seconds, self._timestep - age
        self._curve = None

    def record(self, rows: int, seconds: float) -> None:
        """Record the duration of a timestep with ``rows`` rows."""
        self._timestep += 1
        rows = max(rows, 1)
        bucket = _bucket(rows)
        mean_rows, mean_seconds, _ = self._measured.get(bucket, (float(rows), seconds, 0))
        mean_rows += _WEIGHT * (rows - mean_rows)
        mean_seconds += _WEIGHT * (min(seconds, _OUTLIER * mean_seconds) - mean_seconds)
        self._measured[bucket] = mean_rows, mean_seconds, self._timestep
        self._curve = None

    def seconds(self, rows: int) -> float | None:
        """Expected duration of a timestep with ``rows`` rows; None before the first measurement."""
        curve = self._points()
        if not curve:
            return None
        for (rows_before, before), (rows_after, after) in pairwise(curve):
            if rows_before < rows < rows_after:
                return before + self._share(rows_before, rows, rows_after) * (after - before)
        nearest, seconds = curve[0] if rows <= curve[0][0] else next(point for point in reversed(curve) if point[0] <= rows)
        return seconds * (self._expected(rows) / self._expected(nearest))

    def added(self, rows: int) -> float:
        """The relative increase in time from one more row after ``rows`` rows; infinity beyond the number to be tried."""
        if self._curve is None:
            self._points()
        found = self._added.get(rows)
        if found is None:
            now, then = self.seconds(rows) or self._expected(rows), self.seconds(rows + 1) or self._expected(rows + 1)
            found = then / now - 1
            found = self._added[rows] = inf if rows >= self._most_tried else found
        return found

    def _points(self) -> list[tuple[float, float]]:
        if self._curve is None:
            self._added.clear()
            self._measured = {bucket: one for bucket, one in self._measured.items() if self._timestep - one[2] <= _MAX_AGE}
            points = [self._measured[bucket][:2] for bucket in sorted(self._measured)]
            self._curve = self._rising(points)
            self._most_tried, measured = _FIRST_TRIED, sorted(rows for rows, _ in points)
            while measured and (self._most_tried < measured[0] or any(1 < 2 * rows / self._most_tried <= 2 for rows in measured)):
                self._most_tried *= 2
        return self._curve

    def _expected(self, rows: float) -> float:
        """The milliseconds that the plan expects of ``rows`` rows, or 1. Those of no row are those of one: a first row may always
        enter.
        """
        if not self._expected_ms:
            return 1.0
        place = min(max(rows - 1, 0), len(self._expected_ms) - 1)
        before, after = self._expected_ms[int(place)], self._expected_ms[ceil(place)]
        return before + place % 1 * (after - before)

    def _share(self, before: float, rows: float, after: float) -> float:
        """The place of ``rows`` rows between fewer and more, from 0 to 1: by what the plan expects, else by their number."""
        least, most = self._expected(before), self._expected(after)
        if most > least:
            return (self._expected(rows) - least) / (most - least)
        return (rows - before) / (after - before)

    def _rising(self, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Isotonic regression: neighbouring points whose seconds fall are replaced by their mean, or by what is expected of so
        many rows times the mean of their ratio to it (pool adjacent violators).
        """
        groups: list[list[tuple[float, float]]] = []
        for point in points:
            groups.append([point])
            while len(groups) > 1 and self._fitted(groups[-2])[-1][1] >= self._fitted(groups[-1])[0][1]:
                last = groups.pop()
                groups[-1] += last
        return [point for group in groups for point in self._fitted(group)]

    def _fitted(self, group: list[tuple[float, float]]) -> list[tuple[float, float]]:
        expected = [self._expected(rows) for rows, _ in group]
        ratio = sum(seconds for _, seconds in group) / sum(expected)
        return [(rows, ratio * of_rows) for (rows, _), of_rows in zip(group, expected, strict=True)]


def _bucket(rows: float) -> int:
    return bisect_right(BOUNDS, ceil(rows) - 1)


_OFFERED_WEIGHT = 1 / 16  # of a timestep in the mean of what rows may yield


class OfferedRows:
    """The tokens that the first, the second, … row of a timestep may yield, in the mean of timesteps.

    A timestep takes as long as the most rows of those in flight. Where each row costs time, rows that enter in a burst make a
    whole passage slow, which the same rows, spread over timesteps, would not. So a number of rows has to pay in the mean.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}  # by the number of rows before
        self._offered: dict[int, float] = {}  # in this timestep
        self._has_refused = False

    def mean_with(self, rows: int, tokens: float) -> float:
        """The mean for the row after ``rows`` rows, of which one that may yield ``tokens`` tokens wants to enter now."""
        tokens = self._offered[rows] = max(tokens, self._offered.get(rows, 0.0))
        mean = self._means.get(rows, 0.0)
        return mean + _OFFERED_WEIGHT * (tokens - mean)

    def refuse(self) -> None:
        """The row does not pay, so that those after it are unknown."""
        self._has_refused = True

    def settle(self, certain_tokens: float, rows: int) -> None:
        """End the timestep, at which ``rows`` rows enter; each that was not offered yields ``certain_tokens``."""
        highest = max([rows - 1, *self._offered, *(() if self._has_refused else self._means)])
        for place in range(highest + 1):
            tokens = self._offered.get(place, certain_tokens if place < rows else 0.0)
            mean = self._means.get(place, 0.0)
            self._means[place] = mean + _OFFERED_WEIGHT * (tokens - mean)
        self._offered, self._has_refused = {}, False
