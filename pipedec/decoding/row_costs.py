"""Measured duration of a timestep by the number of rows, and the cost of one more row.

Knows neither requests nor chances.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import inf

BOUNDS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # maximum rows of each bucket
_WEIGHT = 0.15  # of a new measurement
_OUTLIER = 2.0  # a measurement counts as at most this many times the known value
_MAX_AGE = 4096  # timesteps after which a measurement is forgotten
_FIRST_TRIED = 8  # rows


class RowCosts:
    """The seconds of a timestep as a function of its rows: never falling, linear between measurements, and flat outside.

    Rows are tried from few to many, at most twice as many as were measured: otherwise small steps would stay unmeasured.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by bucket
        self._rows: dict[int, float] = {}  # by bucket: mean number of rows
        self._measured_at: dict[int, int] = {}
        self._timestep = 0
        self._curve: list[tuple[float, float]] | None = None  # rows and seconds, ascending
        self._added: dict[int, float] = {}  # by number of rows, as long as the curve is the same
        self._most_tried = _FIRST_TRIED

    def record(self, rows: int, seconds: float) -> None:
        """Record the duration of a timestep with ``rows`` rows."""
        self._timestep += 1
        bucket = bisect_right(BOUNDS, max(rows, 1) - 1)
        known = self._seconds.get(bucket)
        if known is None:
            self._seconds[bucket], self._rows[bucket] = seconds, float(max(rows, 1))
        else:
            self._seconds[bucket] += _WEIGHT * (min(seconds, _OUTLIER * known) - known)
            self._rows[bucket] += _WEIGHT * (max(rows, 1) - self._rows[bucket])
        self._measured_at[bucket] = self._timestep
        self._curve = None

    def seconds(self, rows: int) -> float | None:
        """Expected duration of a timestep with ``rows`` rows; None before the first measurement."""
        curve = self._points()
        if not curve:
            return None
        for (rows_before, before), (rows_after, after) in pairwise(curve):
            if rows < rows_after:
                share = max(rows - rows_before, 0) / (rows_after - rows_before)
                return before + share * (after - before)
        return curve[-1][1]

    def added(self, rows: int) -> float:
        """The relative increase in time from one more row after ``rows`` rows; infinity beyond the number to be tried."""
        if self._curve is None:
            self._points()
        found = self._added.get(rows)
        if found is None:
            now, then = self.seconds(rows), self.seconds(rows + 1)
            found = then / now - 1 if now and then else 0.0
            found = self._added[rows] = inf if rows >= self._most_tried else found
        return found

    def _points(self) -> list[tuple[float, float]]:
        if self._curve is None:
            self._added.clear()
            for bucket in [each for each, at in self._measured_at.items() if self._timestep - at > _MAX_AGE]:
                del self._seconds[bucket], self._rows[bucket], self._measured_at[bucket]
            self._curve = _rising([(self._rows[bucket], self._seconds[bucket]) for bucket in sorted(self._seconds)])
            self._most_tried, measured = _FIRST_TRIED, sorted(self._rows.values())
            while measured and (self._most_tried < measured[0] or any(1 < 2 * rows / self._most_tried <= 2 for rows in measured)):
                self._most_tried *= 2
        return self._curve


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points whose seconds never fall: neighbours that do are replaced by their mean."""
    groups: list[list[tuple[float, float]]] = []
    for point in points:
        groups.append([point])
        while len(groups) > 1 and _mean(groups[-2]) >= _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    return [(rows, _mean(group)) for group in groups for rows, _ in group]


def _mean(group: list[tuple[float, float]]) -> float:
    return sum(seconds for _, seconds in group) / len(group)
