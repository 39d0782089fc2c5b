"""The papers' figures of a sweep.

Hit rates by prompt set, greedy beside stochastic decoding, the tree's width, misses, and the ablations of BiTA.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, pi
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.reports.compared import Ablation, BothWays, by_masks, by_prompt_tokens, fixed_text, greedy_and_stochastic, spread
from pipedec.bench.report.figures import colors, draw_by_method, fits_text, labels, provenance, stages_text, tree_text
from pipedec.bench.report.frames import (
    REFERENCE_GROUPS,
    NoFigure,
    Variant,
    by_prompt_set,
    by_variant,
    headline,
    means,
    one_tree_each,
    over_shared_cases,
    prompt_sets,
    select,
    stage_sweep,
    totals,
    variants,
)
from pipedec.bench.report.style import (
    BASELINE,
    COLUMN_WIDTH,
    FULL_WIDTH,
    GRID,
    METHODS,
    PROMPT_SETS,
    TEXT,
    TICK_POINTS,
    dress,
    finish,
    legend_above,
    log_axis,
    method_looks,
    new_figure,
    set_label,
    shade,
    tick_names,
    whisker,
)
from pipedec.bench.sweep.rows import PipelineColumns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


TREE_METHOD = "pipedec"
_CHILDREN_COLORS = ("#F0B323", "#56B4E9", "#0072B2", "#1B2A41", "#D55E00", "#009E73")
_CHILDREN_MARKERS = ("^", "s", "o", "D", "v", "P")
DRAINING = ("pipedec",)  # every hit of these takes one timestep, so misses account for the rest
_FEWEST_SETS = 3


def accuracy_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """The hit rate of every method that drafts, one spoke per prompt set, all over the same prompts."""
    answers = headline(answers)
    hit_rates = by_variant(totals(answers, "variant")["hit_rate"])
    kept = (one for one in variants(answers) if one.tree is not None and one in hit_rates)
    answers = over_shared_cases(select(answers, kept))
    names = prompt_sets(answers)
    if len(names) < _FEWEST_SETS:
        raise NoFigure(f"it needs {_FEWEST_SETS} prompt sets that methods with a tree have answered, not {len(names)}")
    rates = 100 * by_prompt_set(answers)["hit_rate"].fillna(0.0)
    complete = [one for one in variants(answers) if list(rates.xs(one).index) == names]
    figure = new_figure(5.4, 3.3)
    figure.set_layout_engine("none")  # which does not see how far the names around a circle reach
    axes = figure.add_axes((0.19, 0.17, 0.42, 0.68), projection="polar")
    spokes = [2 * pi * index / len(names) for index in range(len(names))]
    looks = method_looks(one.method for one in complete)
    for one, color, label in zip(complete, colors(complete), labels(complete), strict=True):
        heights = list(rates.xs(one))
        axes.plot(
            [*spokes, spokes[0]], [*heights, heights[0]], color=color, linewidth=1.2, marker=looks[one.method].marker,
            markersize=3, label=label, clip_on=False,
        )  # fmt: skip
    lowest = _dress_radar(axes, spokes, names, min(rates.xs(one).min() for one in complete))
    figure.legend(loc="center left", bbox_to_anchor=(0.705, 0.5), frameon=False, fontsize=TICK_POINTS, labelcolor=TEXT)
    notes = [f"Hit rate (%); the centre is {lowest} %", provenance(select(answers, complete))]
    return finish(figure, [*notes, stages_text(complete), tree_text(complete)], title)


def _dress_radar(axes: Any, spokes: Sequence[float], names: Sequence[str], least: float) -> int:
    """Spokes from the top clockwise, rings every ten or twenty percent; returns the percentage at the centre."""
    from matplotlib.patheffects import withStroke

    lowest = max(0, 10 * floor((least - 5) / 10))
    rings = range(lowest, 101, 10 if lowest >= 40 else 20)
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    axes.set_ylim(lowest, 100)
    axes.set_yticks(rings[1:], [""] * (len(rings) - 1))
    for ring in rings[1:]:  # as texts: the marks of an axis lie under the lines
        axes.text(
            pi / len(spokes), ring, f"{ring} %", ha="center", va="center", fontsize=TICK_POINTS - 1.5, color="#5B6570", zorder=5,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip
    axes.set_xticks(spokes, [set_label(name) for name in names], fontsize=TICK_POINTS, color=TEXT)
    for spoke, tick in zip(spokes, axes.get_xticklabels(), strict=True):
        tick.set_ha("center" if spoke % pi < 0.01 else "left" if spoke < pi else "right")
    axes.tick_params(axis="x", pad=0)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.spines["polar"].set_color(GRID)
    return lowest


_BARS_SHARE = 0.84  # of the room of a prompt set


def stochastic_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Bars of TPOT, and of hit rates below, by prompt set: per method a greedy one and, lighter, a stochastic one.

    Whiskers are the lowest and the highest repeat.
    """
    both = greedy_and_stochastic(answers)
    figure = new_figure(FULL_WIDTH, 3.8)
    latency, hits = figure.subplots(2, 1, sharex=True)
    _draw_both_ways(latency, both, "tpot_ms")
    _draw_both_ways(hits, both, "hit_rate", scale=100.0)
    dress(latency, y_label="TPOT (ms)")
    dress(hits, y_label="hit rate (%)")
    names = prompt_sets(both.greedy)
    hits.set_xticks(range(len(names)), [set_label(name) for name in names])
    hits.set_xlim(-0.5, len(names) - 0.5)
    hits.set_ylim(0, 100)
    for axes in (latency, hits):
        axes.tick_params(axis="x", length=0)
    legend_above(figure, latency, even=True)
    repeated = any(found["draw"].nunique() > 1 for found in both.ways.values())
    notes = [
        provenance(both.answers, "method and decoding"), stages_text(variants(both.greedy)), tree_text(variants(both.answers)),
        both.sampling_text, "Whiskers: lowest and highest repeat" if repeated else "",
    ]  # fmt: skip
    return finish(figure, notes, title)


def _draw_both_ways(axes: Axes, both: BothWays, column: str, scale: float = 1.0) -> None:
    """Bars of a column of ``by_prompt_set``."""
    shown, names = variants(both.greedy), prompt_sets(both.greedy)
    tables = {way: by_prompt_set(found)[column].fillna(0.0) * scale for way, found in both.ways.items()}
    looks = method_looks(both.methods)
    width, bars = _BARS_SHARE / (2 * len(shown)), 0
    for method, label in zip(both.methods, labels(shown), strict=True):
        color = looks[method].color
        for (way, found), look in zip(both.ways.items(), (color, shade(color, 0, 2)), strict=True):
            own = found[found["method"] == method]
            heights = tables[way].xs(variants(own)[0])
            xs = [names.index(name) + (bars - len(shown) + 0.5) * width for name in heights.index]
            axes.bar(xs, heights, 0.92 * width, color=look, label=f"{label}, {way}")
            for x, (name, height) in zip(xs, heights.items(), strict=True):
                if (ends := spread(own[own["prompt_set"] == name], column)) is not None:
                    whisker(axes, x, height, (scale * ends[0], scale * ends[1]))
            bars += 1


_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D31")
_MARKERS = ("o", "^", "s", "v", "D", "P", "X")


def prompt_tokens_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Speed-up and tokens per pass against the length of a deep prompt, one line per prompt set and one of their mean."""
    ablation = by_prompt_tokens(answers)
    figure, panels = _draw_ablation(ablation, "prompt tokens")
    for axes in panels:
        log_axis(axes, "x", list(ablation.points))
    return finish(figure, _ablation_notes(ablation), title)


def masks_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Speed-up and tokens per pass against the number of masks used, one line per prompt set and one of their mean."""
    ablation = by_masks(answers)
    figure, panels = _draw_ablation(ablation, "masks used")
    for axes in panels:
        axes.set_xticks(list(ablation.points))
    return finish(figure, _ablation_notes(ablation), title)


def _draw_ablation(ablation: Ablation[int], x_label: str) -> tuple[Figure, list[Axes]]:
    """Speed-ups on the left, tokens per pass on the right, the legend beside them."""
    figure = new_figure(FULL_WIDTH, 2.6)
    panels = list(figure.subplots(1, 2))
    names, values = prompt_sets(ablation.answers), list(ablation.points)
    table = by_prompt_set(ablation.answers, [BASELINE])
    mean = means(table)
    columns = {f"over {BASELINE}": "speed-up over PP (×)", "tokens_per_pass": "tokens per pass"}
    for axes, (column, label) in zip(panels, columns.items(), strict=True):
        for number, name in enumerate(names):
            look = {"color": _COLORS[number % len(_COLORS)], "marker": _MARKERS[number % len(_MARKERS)]}
            heights = [table.xs(point).loc[name, column] for point in ablation.points.values()]
            axes.plot(values, heights, linewidth=1.1, markersize=4, label=PROMPT_SETS.get(name, name), **look)
        if len(names) > 1:
            heights = [mean.xs(point)[column] for point in ablation.points.values()]
            axes.plot(values, heights, color=TEXT, linewidth=2.2, label="mean", zorder=3)
        dress(axes, x_label, label)
    panels[1].legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=TICK_POINTS, labelcolor=TEXT, handlelength=1.8
    )
    return figure, panels


def _ablation_notes(ablation: Ablation[int]) -> list[str]:
    groups = next(iter(ablation.points.values())).groups
    stages = f"{groups} stages" if groups > 1 else ""
    geometric = "Means: geometric over prompt sets" if len(prompt_sets(ablation.answers)) > 1 else ""
    return [provenance(ablation.answers, "point"), stages, fixed_text(ablation.points.values()), geometric]


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
    draw_by_method(axes, lost)
    dress(axes, "pipeline stages", "timesteps per miss", grid="y")
    axes.set_xticks(stages, tick_names(stages, stages))
    axes.set_ylim(bottom=0)
    legend_above(figure, axes)
    return finish(figure, [provenance(select(answers, drawn), "point"), tree_text(drawn), fits_text(drawn)], title)


def _most_trees(answers: pd.DataFrame) -> pd.DataFrame:
    """The paper's method on the pipeline that ran the most trees; of equals on the paper's, else the longest."""
    by_pipeline: dict[PipelineColumns, list[Variant]] = {}
    for one in variants(answers):
        if one.method == TREE_METHOD and one.tree is not None:
            by_pipeline.setdefault(one.pipeline, []).append(one)
    ranked = sorted(by_pipeline, key=lambda it: (len(by_pipeline[it]), not it.recut, it.groups == REFERENCE_GROUPS, it.groups))
    return select(answers, by_pipeline[ranked[-1]] if ranked else ())
