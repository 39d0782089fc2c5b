"""The pictures of decode threads: how full the pipeline is, and what threads and speculation save together.

Knows the rows of one run (``threads_rows``) and draws them; which figures stand in the bars ``threads_summary`` works out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, log2
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipedec.bench.report.figures.catalogue import Drawn
from pipedec.bench.report.figures.style import (
    COLUMN_WIDTH,
    FAINT,
    FULL_WIDTH,
    LABEL_POINTS,
    TEXT,
    TICK_POINTS,
    dress,
    finish,
    new_figure,
    save,
)
from pipedec.bench.report.methods import method_looks, shade
from pipedec.bench.report.missing import NoFigure
from pipedec.bench.threads_rows import BASELINE, SEQUENTIAL, Question, ThreadRow, ThreadRows
from pipedec.bench.threads_summary import COMBINATIONS, FORKED, combinations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_PANEL_INCHES = 1.05
_MOST_TIMESTEPS = 140
_SCALE = ("#A6CFEA", "#0072B2", "#07243B")  # from one row to many
_THREADS = "#CC79A7"
_BARS_SHARE = 0.84


def draw_threads(rows: ThreadRows, out: Path) -> Drawn:
    """Write ``pipeline-fill`` and ``threads-speedup`` into the directory ``out``, each as PNG and SVG.

    Raises:
        UserError: matplotlib is not installed, or a file cannot be written.
    """
    files: list[Path] = []
    left_out = []
    drawings: dict[str, Callable[[ThreadRows], Figure]] = {"pipeline-fill": fill_figure, "threads-speedup": speedup_figure}
    for name, draw in drawings.items():
        try:
            files += save(draw(rows), out / name)
        except NoFigure as reason:
            left_out.append(f"{name} ({reason})")
    return Drawn(tuple(files), tuple(left_out))


def fill_figure(rows: ThreadRows) -> Figure:
    """Rows by timestep and stage on the longest pipeline: an answer in one thread and in several, with speculation and without.

    Of all dialects and prompts it is the answer with most threads. A panel is the stretch of timesteps with most rows.

    Raises:
        NoFigure: the run has not all four, or no answer has two threads.
    """
    answers = _most_threads(rows)
    both = answers["both"]
    length = min(_MOST_TIMESTEPS, *(len(row.fill) for row in answers.values()))
    most = max(max(map(max, row.fill)) for row in answers.values())
    figure = new_figure(FULL_WIDTH, len(answers) * _PANEL_INCHES + 0.75)
    panels = figure.subplots(len(answers), 1, sharey=True)
    for axes, (way, row) in zip(panels, answers.items(), strict=True):
        image = _draw_fill(axes, row, length, most)
        axes.set_title(_panel_title(way, row), fontsize=LABEL_POINTS, color=TEXT, loc="left", pad=3)
    panels[-1].set_xlabel("timestep", fontsize=LABEL_POINTS, color=TEXT)
    figure.supylabel("stage", fontsize=LABEL_POINTS, color=TEXT)
    bar = figure.colorbar(image, ax=list(panels), pad=0.01, fraction=0.025, aspect=40)
    bar.set_label("rows", fontsize=LABEL_POINTS, color=TEXT)
    bar.ax.tick_params(labelsize=TICK_POINTS, colors=TEXT, length=2)
    bar.outline.set_visible(False)
    notes = [
        f"Emulated: {both.preset}, {both.models}, {both.stages} stages; rows are real",
        f"Prompt {both.question[1]} of {both.question[0]}, dialect {both.dialect}: {both.metrics.threads} threads",
        f"Of each answer the {length} timesteps with most rows",
        "In the titles, of whole answers: the share of stages and timesteps with rows, and how many rows these have",
        "White: the stage is idle",
    ]
    return finish(figure, notes, None)


def speedup_figure(rows: ThreadRows) -> Figure:
    """Bars of speed-up per text token over plain pipelines in one thread, by stages, for each dialect; forked answers alone.

    Raises:
        NoFigure: the run has not all of one thread, several, ``pp`` and another method.
    """
    found = [one for one in combinations(rows) if one.answers == FORKED]
    if not found:
        raise NoFigure("it needs forked answers, dialect none, pp and another method")
    pairs = list(dict.fromkeys((one.dialect, one.method) for one in found))
    figure = new_figure(max(COLUMN_WIDTH, len(pairs) * COLUMN_WIDTH), 2.2)
    panels = figure.subplots(1, len(pairs), sharey=True, squeeze=False)[0]
    for axes, (dialect, method) in zip(panels, pairs, strict=True):
        members = [one for one in found if (one.dialect, one.method) == (dialect, method)]
        color = method_looks([method])[method].color
        colors = {"threads": _THREADS, "speculation": color, "both": shade(color, 1, 2)}
        width = _BARS_SHARE / len(colors)
        for place, way in enumerate(COMBINATIONS[1:]):
            places = [index + (place - 1) * width for index in range(len(members))]
            heights = [one.speedup_token[way] for one in members]
            label = {"threads": f"threads ({dialect})", "speculation": method, "both": "both"}[way]
            axes.bar(places, heights, 0.92 * width, color=colors[way], label=label)
            for x, height in zip(places, heights, strict=True):
                axes.text(x, height, f"{height:.1f}", ha="center", va="bottom", fontsize=TICK_POINTS - 1.5, color=TEXT)
        axes.axhline(1, color=FAINT, linewidth=0.6, zorder=0)
        dress(axes, x_label="stages", y_label="speed-up per text token" if axes is panels[0] else "")
        axes.set_xticks(range(len(members)), [str(one.stages) for one in members])
        axes.tick_params(axis="x", length=0)
    _legends(figure, panels)
    first = rows.all[0]
    counts = "; ".join(
        f"{dialect}: {max(one.count for one in found if one.dialect == dialect)} prompts"
        for dialect in dict.fromkeys(one.dialect for one in found)
    )
    notes = [
        f"Emulated: {first.preset}, {first.models}, computed clock",
        f"Answers of two threads or more, {counts}. Over pp in one thread; geometric means over prompts",
    ]
    return finish(figure, notes, None)


def _legends(figure: Figure, panels: Sequence[Axes]) -> None:
    for axes in panels:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.4, ncols=3, frameon=False, fontsize=TICK_POINTS - 1,
            labelcolor=TEXT, handlelength=1.1, handletextpad=0.4, columnspacing=0.9,
        )  # fmt: skip
    figure.set_figheight(figure.get_figheight() + 0.2)


def _most_threads(rows: ThreadRows) -> dict[str, ThreadRow]:
    """The four answers to the prompt whose answer has most threads, by what they are decoded with."""
    stages = rows.stages[-1]
    candidates: list[tuple[int, dict[str, ThreadRow]]] = []
    for dialect in rows.dialects:
        for method in rows.speculative[-1:]:
            for question in rows.forked(dialect):
                found = _quartet(rows, stages, dialect, method, question)
                if found is not None:
                    candidates.append((found["both"].metrics.threads, found))
    if not candidates:
        raise NoFigure("it needs an answer of two threads, dialect none, pp and another method")
    return max(candidates, key=lambda candidate: candidate[0])[1]


def _quartet(rows: ThreadRows, stages: int, dialect: str, method: str, question: Question) -> dict[str, ThreadRow] | None:
    ways = ((SEQUENTIAL, BASELINE), (dialect, BASELINE), (SEQUENTIAL, method), (dialect, method))
    found = {name: rows.find(stages, *way, question) for name, way in zip(COMBINATIONS, ways, strict=True)}
    whole = {name: row for name, row in found.items() if row is not None}
    return whole if len(whole) == len(found) else None


def _draw_fill(axes: Axes, row: ThreadRow, length: int, most: int) -> AxesImage:
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap

    start = _fullest(row, length)
    shown = np.array(row.fill[start : start + length], dtype=float).T
    shown[shown == 0] = np.nan
    bounds = [2**power for power in range(ceil(log2(most + 1)) + 1)]
    colors = LinearSegmentedColormap.from_list("rows", _SCALE, N=256)
    extent = (start + 0.5, start + length + 0.5, shown.shape[0] + 0.5, 0.5)
    image = axes.imshow(
        shown, cmap=colors, norm=BoundaryNorm(bounds, 256), aspect="auto", interpolation="nearest", extent=extent
    )  # fmt: skip
    dress(axes)
    axes.grid(False)
    axes.set_yticks(sorted({1, shown.shape[0]}))
    return image


def _fullest(row: ThreadRow, length: int) -> int:
    """Where the ``length`` timesteps with most rows begin."""
    rows = np.cumsum([0, *map(sum, row.fill)])
    return int(np.argmax(rows[length:] - rows[:-length]))


def _panel_title(way: str, row: ThreadRow) -> str:
    names = {
        "neither": f"{row.method}, one thread", "threads": f"{row.method}, {row.metrics.threads} threads",
        "speculation": f"{row.method}, one thread", "both": f"{row.method}, {row.metrics.threads} threads",
    }  # fmt: skip
    rows_where_busy = row.rows / row.busy if row.busy else 0.0
    return (
        f"{names[way]}: {row.metrics.text_tokens} text tokens in {row.timesteps} timesteps; "
        f"{row.busy / row.places:.0%} occupied, {rows_where_busy:.1f} rows"
    )
