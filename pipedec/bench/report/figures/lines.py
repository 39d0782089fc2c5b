"""Figures of lines: against the tree's width (the paper's Figure 4), and against the number of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from pipedec.bench.report.captions import provenance, tree_text
from pipedec.bench.report.figures.style import (
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
from pipedec.bench.report.frames import Variant, by_variant, prompt_sets, select, variants
from pipedec.bench.report.methods import BASELINE, DRAINING, METHODS, method_looks
from pipedec.bench.report.missing import NoFigure
from pipedec.bench.report.selection import REFERENCE_GROUPS, one_tree_each, over_shared_cases, stage_sweep
from pipedec.bench.report.statistics import by_prompt_set, means, totals
from pipedec.bench.sweep.rows import SMALL_MODEL, Pipeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TREE_METHOD = "pipedec"
_CHILDREN_COLORS = ("#F0B323", "#56B4E9", "#0072B2", "#1B2A41", "#D55E00", "#009E73")
_CHILDREN_MARKERS = ("^", "s", "o", "D", "v", "P")
_HOLLOW = "Hollow markers: the model does not fit into the memory of these devices"


def tree_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Latency and hit rate of the paper's method against the tree's width, one line per number of children.

    All points are over the same prompts, on the pipeline that ran the most trees.
    """
    answers = over_shared_cases(_most_trees(answers))
    table = means(by_prompt_set(answers))
    table["width"] = [one.tree.width or 0 for one in table.index]
    table["children"] = [one.tree.children or 0 for one in table.index]
    points = table[(table["width"] > 0) & (table["children"] > 0)]
    widths = sorted(set(table["width"]) - {0})
    if len(widths) < 2:
        raise NoFigure(f"it needs {TREE_METHOD} with at least two widths, over prompts that all of them answered")
    figure = new_figure(FULL_WIDTH, 2.6)
    latency, hits = figure.subplots(1, 2)
    for number, (children, found) in enumerate(points.sort_values("width").groupby("children")):
        look = {"color": _CHILDREN_COLORS[number % 6], "marker": _CHILDREN_MARKERS[number % 6], "label": str(children)}
        latency.plot(found["width"], found["tpot_ms"], linewidth=1.3, markersize=4, **look)
        hits.plot(found["width"], 100 * found["hit_rate"].fillna(0.0), linewidth=1.3, markersize=4, **look)
    for axes, label in ((latency, "TPOT (ms)"), (hits, "hit rate (%)")):
        dress(axes, "tree width (rows per layer)", label)
        log_axis(axes, "x", widths)
    legend = hits.legend(
        title="children\nper row", title_fontsize=TICK_POINTS, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False,
        fontsize=TICK_POINTS, labelcolor=TEXT, handlelength=1.8,
    )  # fmt: skip
    legend.get_title().set_color(TEXT)
    several = len(prompt_sets(answers)) > 1
    stages = f"{METHODS[TREE_METHOD].name()}, {table.index[0].groups} stages"
    return finish(
        figure,
        [provenance(answers, "point"), stages, "Means over prompt sets, of latencies geometric ones" if several else ""],
        title,
    )


def speedup_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Speed-up over plain pipeline parallelism on the same pipeline against the number of stages, all over the same prompts."""
    answers = one_tree_each(answers[answers["method"] != SMALL_MODEL])
    every = variants(answers)
    paired = {one.pipeline for one in every if one.method == BASELINE} & {one.pipeline for one in every if one.method != BASELINE}
    answers = over_shared_cases(stage_sweep(select(answers, (one for one in every if one.pipeline in paired))))
    speeds = by_variant(means(by_prompt_set(answers, [BASELINE]))[f"over {BASELINE}"])
    drawn, stages = list(speeds), sorted({one.groups for one in speeds})
    if len(stages) < 2:
        raise NoFigure(f"it needs {BASELINE} and another method on pipelines of two lengths, over prompts that all answered")
    figure = new_figure(COLUMN_WIDTH, 2.5)
    axes = figure.add_subplot()
    axes.plot(stages, stages, color=FAINT, linewidth=1, linestyle=(0, (4, 2)), label="ideal = stages", zorder=1)
    _draw_by_method(axes, speeds)
    dress(axes, "pipeline stages", "speed-up over PP (×)", grid="both")
    log_axis(axes, "x", stages)
    low, high = min(1.0, *speeds.values()), max(stages)
    log_axis(axes, "y", [2**power for power in range(-3, 8) if low / 2 < 2**power <= high])
    legend_above(figure, axes)
    own = provenance(select(answers, drawn), "point")
    return finish(figure, [own, "Geometric mean over prompt sets", tree_text(drawn), _fits_text(drawn)], title)


def misses_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Timesteps lost per miss of ``DRAINING`` methods against the number of stages: (timesteps − hits) / misses of all answers.

    The paper's policy loses exactly as many as there are groups: the pipeline drains once.
    """
    chosen = one_tree_each(answers)
    lost = by_variant(totals(stage_sweep(chosen[chosen["method"].isin(DRAINING)]), "variant")["timesteps_per_miss"])
    drawn, stages = list(lost), sorted({one.groups for one in lost})
    if len(stages) < 2:
        raise NoFigure("it needs misses of the method pipedec on pipelines of two lengths")
    figure = new_figure(COLUMN_WIDTH, 2.4)
    axes = figure.add_subplot()
    axes.plot(stages, stages, color=GRID, linewidth=5, label="one drain per miss", zorder=1, solid_capstyle="butt")
    _draw_by_method(axes, lost)
    dress(axes, "pipeline stages", "timesteps per miss", grid="y")
    axes.set_xticks(stages, tick_names(stages, stages))
    axes.set_ylim(bottom=0)
    legend_above(figure, axes)
    return finish(figure, [provenance(select(answers, drawn), "point"), tree_text(drawn), _fits_text(drawn)], title)


def _draw_by_method(axes: Axes, values: dict[Variant, float]) -> None:
    """A line per method over the number of stages, from a value per variant; hollow markers where the model does not fit."""
    for method, look in method_looks(one.method for one in values).items():
        line = sorted((one.groups, value, one.pipeline.fits) for one, value in values.items() if one.method == method)
        stages, heights, _ = zip(*line, strict=True)
        axes.plot(stages, heights, color=look.color, linewidth=1.4, marker=look.marker, markersize=4.5, label=look.name())
        for groups, value, fits in line:
            if not fits:
                axes.plot(
                    groups, value, color=look.color, marker=look.marker, markersize=4.5, markerfacecolor="white", linestyle=""
                )  # fmt: skip


def _fits_text(drawn: list[Variant]) -> str:
    return "" if all(one.pipeline.fits for one in drawn) else _HOLLOW


def _most_trees(answers: pd.DataFrame) -> pd.DataFrame:
    """The paper's method on the pipeline that ran the most trees; of equals on the paper's, else the longest."""
    by_pipeline: dict[Pipeline, list[Variant]] = {}
    for one in variants(answers):
        if one.method == TREE_METHOD and one.tree is not None:
            by_pipeline.setdefault(one.pipeline, []).append(one)
    ranked = sorted(by_pipeline, key=lambda it: (len(by_pipeline[it]), not it.recut, it.groups == REFERENCE_GROUPS, it.groups))
    return select(answers, by_pipeline[ranked[-1]] if ranked else ())
