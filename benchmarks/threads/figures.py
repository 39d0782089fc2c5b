"""The figures of decode threads: how full the pipeline is, and what threads and speculation save together.

Draws the frame of one run; ``summary`` computes the heights of the bars.
"""

from __future__ import annotations

from math import ceil, log2
from typing import TYPE_CHECKING

import numpy as np
from pandas import DataFrame

from benchmarks.threads.summary import COMBINATIONS, FORKED, combinations, quartets
from pipedec.bench.record import Row
from pipedec.bench.report import style
from pipedec.bench.report.figures import Draw
from pipedec.bench.report.frames import NoFigure
from pipedec.bench.report.style import method_looks, shade

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_PANEL_INCHES = 1.05
_MAX_TIMESTEPS = 140
_SCALE = ("#A6CFEA", "#0072B2", "#07243B")  # from one row to many
_THREADS = "#CC79A7"
_BARS_SHARE = 0.84


def fill_figure(frame: DataFrame, title: str | None = None) -> Figure:
    """The rows of every stage, timestep by timestep, of one answer in one thread and in several, with speculation and without.

    The answer is the one with most threads of all dialects and prompts. Each panel shows the timesteps with most rows. Raises
    NoFigure if the run has not all four, no answer has two threads, or it was measured on a running cluster.
    """
    if frame["preset"][0] is None:
        raise NoFigure("only an emulated pipeline's stages report their rows")
    answers = _most_threads(frame)
    both = answers["both"]
    length = min(_MAX_TIMESTEPS, *(len(one["fill"]) for one in answers.values()))
    most = max(max(map(max, one["fill"])) for one in answers.values())
    figure = style.new_figure(style.FULL_WIDTH, len(answers) * _PANEL_INCHES + 0.75)
    panels = figure.subplots(len(answers), 1, sharey=True)
    for axes, one in zip(panels, answers.values(), strict=True):
        image = _draw_fill(axes, one["fill"], length, most)
        threads = f"{one['threads']} threads" if one["threads"] > 1 else "one thread"
        rows_where_busy = one["rows"] / one["busy"] if one["busy"] else 0.0
        heading = (
            f"{one['method']}, {threads}: {one['text_tokens']} text tokens in {one['timesteps']} timesteps; "
            f"{one['busy'] / one['group_timesteps']:.0%} occupied, {rows_where_busy:.1f} rows"
        )
        axes.set_title(heading, fontsize=style.LABEL_POINTS, color=style.TEXT, loc="left", pad=3)
    panels[-1].set_xlabel("timestep", fontsize=style.LABEL_POINTS, color=style.TEXT)
    figure.supylabel("stage", fontsize=style.LABEL_POINTS, color=style.TEXT)
    bar = figure.colorbar(image, ax=list(panels), pad=0.01, fraction=0.025, aspect=40)
    bar.set_label("rows", fontsize=style.LABEL_POINTS, color=style.TEXT)
    bar.ax.tick_params(labelsize=style.TICK_POINTS, colors=style.TEXT, length=2)
    bar.outline.set_visible(False)
    notes = [
        f"Emulated: {both['preset']}, {both['model']}, {both['stages']} stages; rows are real",
        f"Prompt {both['prompt_index']} of {both['prompt_set']}, dialect {both['dialect']}: {both['threads']} threads",
        f"Of each answer the {length} timesteps with most rows",
        "In the titles, of whole answers: the share of stages and timesteps with rows, and how many rows these have",
        "White: the stage is idle",
    ]
    return style.finish(figure, notes, title)


def speedup_figure(frame: DataFrame, title: str | None = None) -> Figure:
    """Bars of speed-up per text token over plain pipelines in one thread, by stages, for each dialect; forked answers only.

    Raises NoFigure if the run has not all of one thread, several, ``pp`` and another method.
    """
    found = [one for one in combinations(frame) if one["answers"] == FORKED]
    if not found:
        raise NoFigure("it needs forked answers, dialect none, pp and another method")
    pairs = list(dict.fromkeys((one["dialect"], one["method"]) for one in found))
    figure = style.new_figure(max(style.COLUMN_WIDTH, len(pairs) * style.COLUMN_WIDTH), 2.2)
    panels = figure.subplots(1, len(pairs), sharey=True, squeeze=False)[0]
    for axes, (dialect, method) in zip(panels, pairs, strict=True):
        members = [one for one in found if (one["dialect"], one["method"]) == (dialect, method)]
        color = method_looks([method])[method].color
        ways = {
            "threads": (f"threads ({dialect})", _THREADS), "speculation": (method, color), "both": ("both", shade(color, 1, 2)),
        }  # fmt: skip
        width = _BARS_SHARE / len(ways)
        for number, (way, (label, bar_color)) in enumerate(ways.items()):
            positions = [index + (number - 1) * width for index in range(len(members))]
            heights = [one["speedup_token"][way] for one in members]
            bars = axes.bar(positions, heights, 0.92 * width, color=bar_color, label=label)
            axes.bar_label(bars, fmt="%.1f", fontsize=style.TICK_POINTS - 1.5, color=style.TEXT)
        axes.axhline(1, color=style.FAINT, linewidth=0.6, zorder=0)
        style.dress(axes, x_label="stages", y_label="speed-up per text token" if axes is panels[0] else "")
        axes.set_xticks(range(len(members)), [str(one["stages"]) for one in members])
        axes.tick_params(axis="x", length=0)
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.4, ncols=3, frameon=False, fontsize=style.TICK_POINTS - 1,
            labelcolor=style.TEXT, handlelength=1.1, handletextpad=0.4, columnspacing=0.9,
        )  # fmt: skip
    figure.set_figheight(figure.get_figheight() + 0.2)
    counts = "; ".join(
        f"{dialect}: {max(one['count'] for one in found if one['dialect'] == dialect)} prompts"
        for dialect in dict.fromkeys(one["dialect"] for one in found)
    )
    preset = frame["preset"][0]
    notes = [
        "Measured on a running cluster" if preset is None else f"Emulated: {preset}, {frame['model'][0]}, computed clock",
        f"Answers of two threads or more, {counts}. Over pp in one thread; geometric means over prompts",
    ]
    return style.finish(figure, notes, title)


def _most_threads(frame: DataFrame) -> dict[str, Row]:
    """The four answers to the question whose threaded answer has most threads, by combination."""
    found = quartets(frame)
    last_method = found["method"].cat.categories[-1]
    found = found[found["is_forked"] & (found["stages"] == frame["stages"].max()) & (found["method"] == last_method)]
    if found.empty:
        raise NoFigure("it needs an answer of two threads, dialect none, pp and another method")
    found = found.assign(count=frame["threads"][found["both"]].to_numpy()).sort_values("dialect", kind="stable")
    best = found.loc[found["count"].idxmax()]
    return {way: frame.loc[best[way]].to_dict() for way in COMBINATIONS}


def _draw_fill(axes: Axes, fill: list[list[int]], length: int, most: int) -> AxesImage:
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap

    sums = np.cumsum([0, *map(sum, fill)])
    start = int(np.argmax(sums[length:] - sums[:-length]))  # of the ``length`` timesteps with most rows
    shown = np.array(fill[start : start + length], dtype=float).T
    shown[shown == 0] = np.nan
    bounds = [2**power for power in range(ceil(log2(most + 1)) + 1)]
    colors = LinearSegmentedColormap.from_list("rows", _SCALE, N=256)
    extent = (start + 0.5, start + length + 0.5, shown.shape[0] + 0.5, 0.5)
    image = axes.imshow(
        shown, cmap=colors, norm=BoundaryNorm(bounds, 256), aspect="auto", interpolation="nearest", extent=extent
    )  # fmt: skip
    style.dress(axes)
    axes.grid(False)
    axes.set_yticks(sorted({1, shown.shape[0]}))
    return image


FIGURES: dict[str, Draw] = {"pipeline-fill": fill_figure, "threads-speedup": speedup_figure}
