"""Figures of bars: time per output token (TPOT) by prompt set (the paper's Figure 5), and where the time of a timestep goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from pipedec.bench.report.captions import colors, labels, provenance, stages_text, tree_text
from pipedec.bench.report.figures.style import (
    FULL_WIDTH,
    TEXT,
    TICK_POINTS,
    dress,
    finish,
    legend_above,
    new_figure,
    whisker,
)
from pipedec.bench.report.frames import at, prompt_sets, select, variants
from pipedec.bench.report.methods import method_looks
from pipedec.bench.report.missing import NoFigure
from pipedec.bench.report.prompt_sets import set_label
from pipedec.bench.report.selection import headline, one_tree_each, over_shared_cases
from pipedec.bench.report.statistics import by_prompt_set, interval
from pipedec.bench.report.timeline import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From the start of a bar to its end: work first, idleness last.
PARTS = {
    "compute": CATEGORIES["forward"],
    "transfer": "#7F8C99",
    "sync": CATEGORIES["sync"],
    "scheduler": CATEGORIES["prefill"],
    "wait": "#E4E8EC",
}
_OTHER_PART = "#56B4E9"
_PIPELINE_GAP = 0.5  # bars
_BARS_SHARE = 0.84  # of the room of a prompt set


def latency_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Bars of TPOT by prompt set, one per method and pipeline, all over the same prompts; 95 % intervals over prompts."""
    answers = over_shared_cases(headline(answers))
    if answers.empty:
        raise NoFigure("no prompt was answered by all methods")
    shown, names, table = variants(answers), prompt_sets(answers), by_prompt_set(answers)
    figure = new_figure(FULL_WIDTH, 2.5)
    axes = figure.add_subplot()
    width = _BARS_SHARE / len(shown)
    has_intervals = False
    for number, (one, color, label) in enumerate(zip(shown, colors(shown), labels(shown), strict=True)):
        heights = at(table["tpot_ms"], one)
        xs = [names.index(name) + (number - (len(shown) - 1) / 2) * width for name in heights.index]
        axes.bar(xs, heights, 0.92 * width, color=color, label=label)
        own = select(answers, [one])
        for x, (name, height) in zip(xs, heights.items(), strict=True):
            if (ends := interval(own[own["prompt_set"] == name])) is not None:
                whisker(axes, x, height, ends)
                has_intervals = True
    dress(axes, y_label="TPOT (ms)")
    axes.set_xticks(range(len(names)), [set_label(name) for name in names])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(names) - 0.5)
    legend_above(figure, axes)
    notes = [
        provenance(answers), stages_text(shown), tree_text(shown), "Whiskers: 95 % interval over prompts" if has_intervals else ""
    ]  # fmt: skip
    return finish(figure, notes, title)


def breakdown_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Stacked bars of the ms of a timestep by phase, one per method and pipeline, from the answers that were traced."""
    traced = answers[answers["breakdown"].map(bool) & (answers["timesteps"] > 0)]
    if traced.empty:
        raise NoFigure("no row has a breakdown")
    traced = one_tree_each(traced)
    shown = sorted(
        variants(traced), key=lambda one: (one.groups, one.pipeline.name)
    )  # within a pipeline, methods keep their order
    lengths = phases(traced).loc[shown]
    figure = new_figure(FULL_WIDTH, 0.94 + 0.22 * len(shown))
    axes = figure.add_subplot()
    pipelines = list(dict.fromkeys(one.pipeline for one in shown))
    ys = [number + _PIPELINE_GAP * pipelines.index(one.pipeline) for number, one in enumerate(shown)]
    ends = lengths.cumsum(axis="columns")
    for part in lengths:
        starts = ends[part] - lengths[part]
        axes.barh(ys, lengths[part], 0.72, starts, color=PARTS.get(str(part), _OTHER_PART), label=str(part))
    for y, end in zip(ys, ends.iloc[:, -1], strict=True):
        axes.annotate(
            f"{end:.1f}", (end, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=TICK_POINTS, color=TEXT
        )
    dress(axes, x_label="time per timestep (ms), mean over stages", grid="x")
    looks = method_looks(one.method for one in shown)
    axes.set_yticks(ys, [f"{looks[one.method].name()}, {one.pipeline.name}" for one in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(ys[-1] + 0.6, -0.6)
    axes.margins(x=0.06)
    legend_above(figure, axes)
    return finish(figure, [provenance(traced, "bar"), tree_text(shown)], title)


def phases(traced: pd.DataFrame) -> pd.DataFrame:
    """Ms per timestep of each phase (column) and variant, mean over timesteps."""
    parts = pd.DataFrame(list(traced["breakdown"]), index=traced.index).fillna(0.0)
    parts = parts[sorted(parts, key=lambda part: (list(PARTS).index(part) if part in PARTS else len(PARTS), part))]
    sums = parts.mul(traced["timesteps"], axis="index").groupby(traced["variant"], observed=True).sum()
    return sums.div(traced.groupby("variant", observed=True)["timesteps"].sum(), axis="index")
