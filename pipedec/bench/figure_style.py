"""What all pictures have in common: size, type, axes, the legend outside the data, the small print, how they are saved.

Knows matplotlib (an optional dependency) and how series are named; it does not know what a picture shows.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, inf, log2
from pathlib import Path
from typing import TYPE_CHECKING

from pipedec.bench.figure_methods import method_looks, pipelined, shade
from pipedec.bench.figure_series import Series
from pipedec.core import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT = "#20262E"
FAINT = "#B4BCC5"
GRID = "#E3E7EB"
FULL_WIDTH, COLUMN_WIDTH = 7.0, 3.4  # inches, as in print
LABEL_POINTS, TICK_POINTS, NOTE_POINTS = 8.0, 7.5, 5.5
FORMATS = (".png", ".svg")
_AXIS_POINTS = 50  # the room of numbers and label left of the axes
_LEGEND_INCHES = 0.16  # a row
_DPI = 220
_CLEARANCE = 0.065  # of the length of an axis


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'pipedec[bench]'") from None
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def dress(axes: Axes, x_label: str = "", y_label: str = "", grid: str = "y") -> None:
    """Labels, a grid behind the data along ``grid`` (``x``, ``y`` or ``both``), no frame on top and right."""
    axes.set_xlabel(x_label, fontsize=LABEL_POINTS, color=TEXT)
    axes.set_ylabel(y_label, fontsize=LABEL_POINTS, color=TEXT)
    axes.tick_params(labelsize=TICK_POINTS, colors=TEXT, length=2.5, width=0.6)
    axes.set_axisbelow(True)
    axes.grid(True, axis=grid, color=GRID, linewidth=0.6)  # type: ignore[arg-type]
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_linewidth(0.6)
        spine.set_color(TEXT)


def log_axis(axes: Axes, axis: str, values: Sequence[int | float]) -> None:
    """A base-2 axis with a plain number at each of ``values``, and no other marks."""
    names = tick_names(values, [log2(value) for value in values])
    if axis == "x":
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, names)
    else:
        axes.set_yscale("log", base=2)
        axes.set_yticks(values, names)
    axes.tick_params(axis=axis, which="minor", length=0)  # type: ignore[arg-type]
    axes.tick_params(labelsize=TICK_POINTS, colors=TEXT)


def tick_names(values: Sequence[int | float], places: Sequence[float]) -> list[str]:
    """A number for each value, none where it would run into the one behind it."""
    names, last = [], inf
    for value, place in zip(reversed(values), reversed(places), strict=True):
        clear = last - place >= _CLEARANCE * (places[-1] - places[0])
        names.append(f"{value:g}" if clear else "")
        last = place if clear else last
    return names[::-1]


def whisker(axes: Axes, place: float, middle: float, ends: tuple[float, float]) -> None:
    """A thin line over a bar at ``place`` that reaches ``middle``, from one end to the other."""
    low, high = ends
    axes.errorbar(place, middle, [[middle - low], [high - middle]], color=TEXT, linewidth=0.6, capsize=1.2, capthick=0.6)


def legend_above(figure: Figure, axes: Axes, even: bool = False) -> None:
    """The legend of ``axes`` above them, from the left, in as many columns as fit; the figure grows by its rows.

    With ``even`` all columns are of one length.
    """
    _, names = axes.get_legend_handles_labels()
    width = figure.get_figwidth() * 72 - _AXIS_POINTS
    counts = [count for count in range(len(names), 1, -1) if not even or len(names) % count == 0]
    columns = next((count for count in counts if _legend_points(names, count) <= width), 1)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.4, ncols=columns, frameon=False, fontsize=TICK_POINTS,
        labelcolor=TEXT, handlelength=1.3, handletextpad=0.5, columnspacing=1.2,
    )  # fmt: skip
    figure.set_figheight(figure.get_figheight() + _LEGEND_INCHES * ceil(len(names) / columns))


def finish(figure: Figure, notes: Iterable[str], title: str | None) -> Figure:
    """Add the small print under the picture, and the title if there is one."""
    characters = int(figure.get_figwidth() * 72 / (0.57 * NOTE_POINTS))
    text = ". ".join(note for note in notes if note) + "."
    note = "\n".join(textwrap.wrap(text, characters, break_on_hyphens=False))
    figure.supxlabel(note, x=0.01, ha="left", fontsize=NOTE_POINTS, color="#5B6570")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=LABEL_POINTS + 1, color=TEXT)
    return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write the picture in every format; equal pictures give equal files.

    Raises:
        UserError: they cannot be written.
    """
    from matplotlib import rc_context

    paths = [stem.with_name(stem.name + ending) for ending in FORMATS]
    try:
        with rc_context({"svg.hashsalt": "pipedec"}):
            for path in paths:
                figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or stem}: {error.strerror}") from None
    return paths


def colors(series: Sequence[Series]) -> list[str]:
    """A colour for each: the method's, and from light to dark where one method stands on pipelines of several lengths."""
    looks = method_looks(one.method for one in series)
    lengths = {method: sorted({one.groups for one in series if one.method == method}) for method in looks}
    return [
        shade(looks[one.method].color, lengths[one.method].index(one.groups), len(lengths[one.method])) for one in series
    ]  # fmt: skip


def labels(series: Sequence[Series]) -> list[str]:
    """A name for each.

    With the number of stages where pipelined methods stand on several, with the preset where names are still the same.
    """
    looks = method_looks(one.method for one in series)
    several = len({one.groups for one in series if pipelined(one.method)}) > 1
    names = [looks[one.method].name(one.groups if several and pipelined(one.method) else None) for one in series]
    twice = Counter(names)
    return [f"{name} ({one.pipeline.name})" if twice[name] > 1 else name for name, one in zip(names, series, strict=True)]


def stages_text(series: Sequence[Series]) -> str:
    """For small print: the number of stages of those whose label does not say it."""
    told = labels(series)
    silent: dict[int, list[str]] = {}
    for one, label in zip(series, told, strict=True):
        if str(one.groups) not in label and one.groups > 1:
            silent.setdefault(one.groups, []).append(label)
    return "; ".join(f"{', '.join(names)}: {groups} stages" for groups, names in silent.items())


def _legend_points(names: Sequence[str], columns: int) -> float:
    """About how wide a legend is whose names fill ``columns`` columns one after another."""
    tall, extra = divmod(len(names), columns)
    starts = [column * tall + min(column, extra) for column in range(columns + 1)]
    longest = [max(len(name) for name in names[start:end]) for start, end in pairwise(starts)]
    return TICK_POINTS * sum(0.54 * length + 3.0 for length in longest)
