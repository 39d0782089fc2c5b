"""The picture of a benchmark of faults: how long each kind took, and what the processes used over time.

Reads rows of ``benchmark``; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, cast

from pipedec.bench.faults.summary import noticed_seconds, waits
from pipedec.bench.record import Row
from pipedec.bench.report.figures.style import FULL_WIDTH, TEXT, TICK_POINTS, dress, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_ROLES = {"ranks": "#0072B2", "supervisor": "#E69F00", "redis": "#009E73", "helper": "#CC79A7"}
_USED = (("memory (MiB)", "rss_mib"), ("file descriptors", "descriptors"), ("threads", "threads"))


def faults_figure(rows: Sequence[Row], title: str | None = None) -> Figure | None:
    """Distributions by kind above, four resources over time below; None without faults."""
    if not rows:
        return None
    figure = new_figure(FULL_WIDTH, 4.6)
    above, below = cast("Sequence[SubFigure]", figure.subfigures(2, 1))
    left, right = above.subplots(1, 2, sharey=True)
    _strips(left, rows, "until noticed (s)", lambda row: [one for one in [noticed_seconds(row)] if one is not None])
    _strips(right, rows, "until the next token (s)", waits)
    panels = below.subplots(1, 4)
    for axes, (label, name) in zip(panels, _USED, strict=False):
        _over_time(axes, rows, label, name)
    _keys(panels[3], rows)
    handles, names = panels[0].get_legend_handles_labels()
    below.legend(handles, names, loc="outside upper left", ncols=4, frameon=False, fontsize=TICK_POINTS, labelcolor=TEXT)
    bad = sum(bool(row["problems"]) for row in rows)
    answers = sum(len(row["requests"]) for row in rows)
    pipeline = rows[0]["config"]["pipeline"]
    notes = [
        f"{len(rows)} faults, {answers} answers compared, {bad} faults with problems",
        f"{len(pipeline['layers'])} stages, dispatch of {pipeline['dispatch']}",
        f"pipedec {rows[0]['version']} {rows[0]['revision'][:8]}",
        "A dot is a fault, or an answer; the line is the median",
    ]
    return finish(figure, notes, title)


def _strips(axes: Axes, rows: Sequence[Row], label: str, seconds: Callable[[Row], list[float]]) -> None:
    """A dot for each number, a line at the median of each kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for place, kind in enumerate(kinds):
        values = sorted(value for row in rows if row["kind"] == kind for value in seconds(row))
        if not values:
            continue
        offsets = [place + 0.5 * ((7 * index % 11) / 11 - 0.5) for index in range(len(values))]
        axes.plot(values, offsets, ".", markersize=3, color=_ROLES["ranks"], alpha=0.6)
        middle = median(values)
        axes.plot([middle, middle], [place - 0.35, place + 0.35], color=TEXT, linewidth=1.2)
    dress(axes, label, grid="x")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6)


def _over_time(axes: Axes, rows: Sequence[Row], label: str, name: str) -> None:
    """A line for each role; the ranks together."""
    for role, color in _ROLES.items():
        points = [(row["at_s"] / 60, sum(_of(role, row, name))) for row in rows if _of(role, row, name)]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.0, marker=".", markersize=2, label=role)
    dress(axes, "minutes", label, grid="both")
    axes.set_ylim(bottom=0)


def _of(role: str, row: Row, name: str) -> list[float]:
    return [one[name] for one in row["usage"] if one["role"] == role or (role == "ranks" and one["role"].startswith("rank "))]


def _keys(axes: Axes, rows: Sequence[Row]) -> None:
    points = [(row["at_s"] / 60, row["keys"]) for row in rows if row["keys"] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=_ROLES["redis"], linewidth=1.0, marker=".", markersize=2)
    dress(axes, "minutes", "keys in Redis", grid="both")
    axes.set_ylim(bottom=0)
