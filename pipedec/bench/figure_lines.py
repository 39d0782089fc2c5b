"""The pictures of lines: against the tree's width (the paper's Figure 4), and against the number of stages.

Knows rows of one timing (``sweep_rows.studies``) and draws them; it reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipedec.bench.figure_methods import BASELINE, DRAINING, METHODS, method_looks
from pipedec.bench.figure_series import (
    REFERENCE_GROUPS,
    NoFigure,
    Series,
    all_series,
    chosen_series,
    geometric_mean,
    over_shared_cases,
    provenance,
    speedups,
    stage_sweep,
    tree_text,
)
from pipedec.bench.figure_style import (
    COLUMN_WIDTH,
    FAINT,
    FULL_WIDTH,
    GRID,
    TEXT,
    TICK_POINTS,
    dress,
    finish,
    legend_above,
    log_axis,
    new_figure,
    tick_names,
)
from pipedec.bench.sweep_rows import SMALL_MODEL, Pipeline, SweepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TREE_METHOD = "pipedec"
_CHILDREN_COLORS = ("#F0B323", "#56B4E9", "#0072B2", "#1B2A41", "#D55E00", "#009E73")
_CHILDREN_MARKERS = ("^", "s", "o", "D", "v", "P")
_HOLLOW = "Hollow markers: the model would not fit into the memory of so many of these devices"


def tree_figure(rows: Sequence[SweepRow], title: str | None = None) -> Figure:
    """Latency and hit rate of the paper's method against the tree's width, one line per number of children.

    All points are over the same prompts, on the pipeline that ran the most trees.
    """
    series = over_shared_cases(_most_trees(rows))
    widths = sorted({width for one in series if (width := _width(one))})
    children = sorted({one.tree.children for one in series if one.tree and one.tree.children})
    if len(widths) < 2:
        raise NoFigure(f"it needs {TREE_METHOD} with at least two widths, over prompts that all of them answered")
    figure = new_figure(FULL_WIDTH, 2.6)
    panels = figure.subplots(1, 2)
    for place, count in enumerate(children):
        line = sorted((one for one in series if one.tree and one.tree.children == count and _width(one)), key=_width)
        look = {"color": _CHILDREN_COLORS[place % 6], "marker": _CHILDREN_MARKERS[place % 6]}
        hits = [100 * (one.hit_rate or 0.0) for one in line]
        for axes, values in zip(panels, ([one.ms_per_token for one in line], hits), strict=True):
            axes.plot([_width(one) for one in line], values, linewidth=1.3, markersize=4, label=str(count), **look)
    for axes, label in zip(panels, ("latency per token (ms)", "hit rate (%)"), strict=True):
        dress(axes, "tree width (rows per layer)", label)
        log_axis(axes, "x", widths)
    legend = panels[1].legend(
        title="children\nper row", title_fontsize=TICK_POINTS, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False,
        fontsize=TICK_POINTS, labelcolor=TEXT, handlelength=1.8,
    )  # fmt: skip
    legend.get_title().set_color(TEXT)
    means = (
        "Means over prompt sets, of latencies geometric ones"
        if len({row.prompt_set for one in series for row in one.rows}) > 1
        else ""
    )
    stages = f"{METHODS[TREE_METHOD].name()}, {series[0].groups} stages"
    return finish(figure, [provenance(series, "point"), stages, means], title)


def speedup_figure(rows: Sequence[SweepRow], title: str | None = None) -> Figure:
    """Speed-up over plain pipeline parallelism on the same pipeline against the number of stages, all over the same prompts."""
    every = [one for one in chosen_series(rows) if one.method != SMALL_MODEL]
    paired = {one.pipeline for one in every if one.method == BASELINE} & {one.pipeline for one in every if one.method != BASELINE}
    series = over_shared_cases(stage_sweep([one for one in every if one.pipeline in paired]))
    others = [one for one in series if one.method != BASELINE]
    points = [(one, geometric_mean(ratios.values())) for one in others if (ratios := speedups(one, series))]
    drawn = [one for one, _ in points]
    stages = sorted({one.groups for one in drawn})
    if len(stages) < 2:
        raise NoFigure(f"it needs {BASELINE} and another method on pipelines of two lengths, over prompts that all answered")
    figure = new_figure(COLUMN_WIDTH, 2.5)
    axes = figure.add_subplot()
    axes.plot(stages, stages, color=FAINT, linewidth=1, linestyle=(0, (4, 2)), label="ideal = stages", zorder=1)
    _draw_by_method(axes, points)
    dress(axes, "pipeline stages", "speed-up over PP (×)", grid="both")
    log_axis(axes, "x", stages)
    low, high = min(1.0, *(speed for _, speed in points)), max(stages)
    log_axis(axes, "y", [2**power for power in range(-3, 8) if low / 2 < 2**power <= high])
    legend_above(figure, axes)
    fits = "" if all(one.pipeline.fits for one in drawn) else _HOLLOW
    return finish(figure, [provenance(drawn, "point"), "Geometric mean over prompt sets", tree_text(drawn), fits], title)


def misses_figure(rows: Sequence[SweepRow], title: str | None = None) -> Figure:
    """Timesteps lost per miss of ``DRAINING`` methods against the number of stages: (timesteps − hits) / misses of all answers.

    The paper's policy loses exactly as many as there are groups: the pipeline drains once.
    """
    series = stage_sweep([one for one in chosen_series(rows) if one.method in DRAINING])
    points = [(one, lost) for one in series if (lost := one.totals.lost_per_miss) is not None]
    drawn = [one for one, _ in points]
    stages = sorted({one.groups for one in drawn})
    if len(stages) < 2:
        raise NoFigure("it needs misses of the method pipedec on pipelines of two lengths")
    figure = new_figure(COLUMN_WIDTH, 2.4)
    axes = figure.add_subplot()
    axes.plot(stages, stages, color=GRID, linewidth=5, label="one drain per miss", zorder=1, solid_capstyle="butt")
    _draw_by_method(axes, points)
    dress(axes, "pipeline stages", "timesteps per miss", grid="y")
    axes.set_xticks(stages, tick_names(stages, stages))
    axes.set_ylim(bottom=0)
    legend_above(figure, axes)
    fits = "" if all(one.pipeline.fits for one in drawn) else _HOLLOW
    return finish(figure, [provenance(drawn, "point"), tree_text(drawn), fits], title)


def _draw_by_method(axes: Axes, points: Sequence[tuple[Series, float]]) -> None:
    """A line per method; hollow markers where the model does not fit."""
    for method, look in method_looks(one.method for one, _ in points).items():
        line = sorted(((one, value) for one, value in points if one.method == method), key=lambda point: point[0].groups)
        stages, values = [one.groups for one, _ in line], [value for _, value in line]
        axes.plot(stages, values, color=look.color, linewidth=1.4, marker=look.marker, markersize=4.5, label=look.name())
        hollow = [(one.groups, value) for one, value in line if not one.pipeline.fits]
        for place, value in hollow:
            axes.plot(place, value, color=look.color, marker=look.marker, markersize=4.5, markerfacecolor="white", linestyle="")


def _most_trees(rows: Sequence[SweepRow]) -> list[Series]:
    """The series of the paper's method on the pipeline that ran the most trees; of equals on the paper's, else the longest."""
    by_pipeline: dict[Pipeline, list[Series]] = {}
    for one in all_series(rows):
        if one.method == TREE_METHOD and one.tree is not None:
            by_pipeline.setdefault(one.pipeline, []).append(one)
    ranked = sorted(by_pipeline, key=lambda it: (len(by_pipeline[it]), not it.recut, it.groups == REFERENCE_GROUPS, it.groups))
    return by_pipeline[ranked[-1]] if ranked else []


def _width(series: Series) -> int:
    return (series.tree.width if series.tree else None) or 0
