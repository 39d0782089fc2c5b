"""The common style of figures and tables: names, order, colours and markers of methods and prompt sets; size, type and axes.

Knows names and matplotlib (an optional dependency), nothing of rows. Colours are Okabe and Ito's, which colour-blind readers can
distinguish; methods that are not listed here get the next free ones, in alphabetical order after the listed ones.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from math import ceil, inf, log2
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from pipedec.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


TEXT = "#20262E"
FAINT = "#B4BCC5"
GRID = "#E3E7EB"
FULL_WIDTH, COLUMN_WIDTH = 7.0, 3.4  # inches, as in print
LABEL_POINTS, TICK_POINTS, NOTE_POINTS = 8.0, 7.5, 5.5
FORMATS = (".png", ".svg")
_AXIS_POINTS = 50  # the space of numbers and label left of the axes
_LEGEND_INCHES = 0.16  # a row
_DPI = 220
_CLEARANCE = 0.065  # least share of an axis between its last label and the one before

PROMPT_SETS = {
    "humaneval": "HumanEval",
    "translation": "translation",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
    "summarization": "summarization",
    "mt_bench": "MT-bench",
}
BASELINE = "pp"


@dataclass(frozen=True)
class MethodLook:
    """One method: its name (``{}`` stands for the number of stages), colour and marker."""

    label: str
    color: str
    marker: str

    def name(self, groups: int | None = None) -> str:
        return self.label.format("" if groups is None else f"-{groups}")


METHODS = {
    BASELINE: MethodLook("PP{}", "#8A9199", "s"),
    "stpp": MethodLook("STPP{}", "#E69F00", "^"),
    "stpp-tuned": MethodLook("STPP{} tuned", "#D55E00", "v"),
    "bita": MethodLook("BiTA{}", "#6A4C9C", "P"),
    "pipedec": MethodLook("PipeDec{}", "#0072B2", "o"),
    "pipedec-bestfirst": MethodLook("PipeDec{} best-first", "#009E73", "D"),
}
_OTHER_COLORS = ("#56B4E9", "#8C6D31", "#882255", "#000000")
_OTHER_MARKERS = ("<", ">", "h", "*")
_LIGHTEST, _DARKEST = 0.55, -0.45


def pipelined(method: str) -> bool:
    """Whether the method keeps a prediction tree in the pipeline, as the paper's does: a miss drains it once."""
    return method.startswith("pipedec")


def method_rank(method: str) -> tuple[int, str]:
    """Sorts methods: the known ones in their order, then the others by name."""
    return (list(METHODS).index(method) if method in METHODS else len(METHODS)), method


def method_looks(methods: Iterable[str]) -> dict[str, MethodLook]:
    """The look of every method in ``methods``, in their order."""
    others = cycle(zip(_OTHER_COLORS, _OTHER_MARKERS, strict=True))
    looks = {}
    for method in sorted(set(methods), key=method_rank):
        label = method.replace("{", "{{").replace("}", "}}") + "{}"
        looks[method] = METHODS[method] if method in METHODS else MethodLook(label, *next(others))
    return looks


def shade(color: str, index: int, count: int) -> str:
    """The colour of variant ``index`` of ``count``: from light to dark, the colour itself if there is only one."""
    amount = 0.0 if count == 1 else _LIGHTEST + (_DARKEST - _LIGHTEST) * index / (count - 1)
    end = 255 if amount > 0 else 0
    channels = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (end - channel) * abs(amount)):02X}" for channel in channels)


def prompt_set_rank(name: str) -> tuple[int, str]:
    """Sorts prompt sets: the listed ones in their order, then the others by name."""
    return (list(PROMPT_SETS).index(name) if name in PROMPT_SETS else len(PROMPT_SETS)), name


def set_label(name: str) -> str:
    """The name under an axis."""
    return PROMPT_SETS.get(name, name.replace("_", " "))


def terminal_table(title: str, columns: Iterable[str], left: Collection[str], caption: str | None = None) -> Table:
    """An empty table for a terminal; the columns in ``left`` are left-aligned, others right-aligned."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches. Raises UserError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'pipedec[bench]'") from None
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def dress(axes: Axes, x_label: str = "", y_label: str = "", grid: str = "y") -> None:
    """Labels, a grid under the data along ``grid`` (``x``, ``y`` or ``both``), no frame on top and right."""
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
    getattr(axes, f"set_{axis}scale")("log", base=2)
    getattr(axes, f"set_{axis}ticks")(values, names)
    axes.tick_params(axis=axis, which="minor", length=0)  # type: ignore[arg-type]
    axes.tick_params(labelsize=TICK_POINTS, colors=TEXT)


def tick_names(values: Sequence[int | float], positions: Sequence[float]) -> list[str]:
    """A number for each value, none where it would overlap the next one."""
    names, last = [], inf
    for value, position in zip(reversed(values), reversed(positions), strict=True):
        clear = last - position >= _CLEARANCE * (positions[-1] - positions[0])
        names.append(f"{value:g}" if clear else "")
        last = position if clear else last
    return names[::-1]


def whisker(axes: Axes, x: float, middle: float, ends: tuple[float, float]) -> None:
    """A thin vertical line over the bar at ``x`` of height ``middle``, from one end to the other."""
    low, high = ends
    axes.errorbar(x, middle, [[middle - low], [high - middle]], color=TEXT, linewidth=0.6, capsize=1.2, capthick=0.6)


def legend_above(figure: Figure, axes: Axes, even: bool = False) -> None:
    """The legend of ``axes`` above them, left-aligned, in as many columns as fit; the figure grows by its rows.

    With ``even`` all columns have the same length.
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
    """Add the small print under the figure, and the title if there is one."""
    characters = int(figure.get_figwidth() * 72 / (0.57 * NOTE_POINTS))
    text = ". ".join(note for note in notes if note) + "."
    note = "\n".join(textwrap.wrap(text, characters, break_on_hyphens=False))
    figure.supxlabel(note, x=0.01, ha="left", fontsize=NOTE_POINTS, color="#5B6570")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=LABEL_POINTS + 1, color=TEXT)
    return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write the figure in every format; equal figures give equal files. Raises UserError if they cannot be written."""
    from matplotlib import rc_context

    paths = [stem.with_name(stem.name + ending) for ending in FORMATS]
    try:
        with rc_context({"svg.hashsalt": "pipedec"}):
            for path in paths:
                figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or stem}: {error.strerror}") from None
    return paths


def _legend_points(names: Sequence[str], columns: int) -> float:
    """About how wide a legend is whose names fill ``columns`` columns one after another."""
    tall, extra = divmod(len(names), columns)
    starts = [column * tall + min(column, extra) for column in range(columns + 1)]
    longest = [max(len(name) for name in names[start:end]) for start, end in pairwise(starts)]
    return TICK_POINTS * sum(0.54 * length + 3.0 for length in longest)
