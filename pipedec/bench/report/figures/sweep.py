"""The figures of ``pipedec bench plot``.

Time per output token by prompt set (the paper's Figure 5), speed-up over the number of stages, the parts of a timestep's time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from pipedec.bench.report.captions import colors, labels, provenance, stages_text, tree_text
from pipedec.bench.report.figures.style import (
    COLUMN_WIDTH,
    FAINT,
    FULL_WIDTH,
    TEXT,
    TICK_POINTS,
    dress,
    finish,
    legend_above,
    log_axis,
    new_figure,
    save,
    whisker,
)
from pipedec.bench.report.frames import NoFigure, Variant, at, by_variant, greedy, prompt_sets, select, variants
from pipedec.bench.report.looks import BASELINE, method_looks, set_label
from pipedec.bench.report.selection import headline, one_bita, one_tree_each, over_shared_cases, stage_sweep
from pipedec.bench.report.statistics import by_prompt_set, interval, means
from pipedec.bench.report.timeline import CATEGORIES
from pipedec.bench.sweep.rows import SMALL_MODEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


_HOLLOW = "Hollow markers: the model does not fit into the memory of these devices"


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
    draw_by_method(axes, speeds)
    dress(axes, "pipeline stages", "speed-up over PP (×)", grid="both")
    log_axis(axes, "x", stages)
    low, high = min(1.0, *speeds.values()), max(stages)
    log_axis(axes, "y", [2**power for power in range(-3, 8) if low / 2 < 2**power <= high])
    legend_above(figure, axes)
    own = provenance(select(answers, drawn), "point")
    return finish(figure, [own, "Geometric mean over prompt sets", tree_text(drawn), fits_text(drawn)], title)


def draw_by_method(axes: Axes, values: dict[Variant, float]) -> None:
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


def fits_text(drawn: list[Variant]) -> str:
    """A note on hollow markers, if there are any."""
    return "" if all(one.pipeline.fits for one in drawn) else _HOLLOW


Draw = Callable[[pd.DataFrame, str | None], "Figure"]


def of_greedy(draw: Draw) -> Draw:
    """``draw`` with the greedy answers alone."""
    return lambda answers, title: draw(greedy(answers), title)


def of_methods(draw: Draw) -> Draw:
    """``draw``, which compares methods, with one BiTA if there are several."""
    return lambda answers, title: draw(one_bita(answers), title)


FIGURES: dict[str, Draw] = {
    "latency": of_methods(of_greedy(latency_figure)),
    "speedup": of_methods(of_greedy(speedup_figure)),
    "breakdown": of_methods(of_greedy(breakdown_figure)),
}


@dataclass(frozen=True)
class Drawn:
    """The files that were written, and why other figures were left out (``name (reason)``)."""

    files: tuple[Path, ...]
    left_out: tuple[str, ...]


def draw_figures(studies: Mapping[str, pd.DataFrame], out: Path, figures: Mapping[str, Draw], title: str | None = None) -> Drawn:
    """Draw ``figures`` into the directory ``out``, each as NAME.png and NAME.svg.

    With answers of several timings there is a figure of each (NAME-measured.png, …): one figure never mixes them.

    Raises:
        UserError: matplotlib is not installed, or a file cannot be written.
    """
    files: list[Path] = []
    left_out = []
    for name, draw in figures.items():
        for timing, answers in studies.items():
            stem = name if len(studies) == 1 else f"{name}-{timing}"
            try:
                files += save(draw(answers, title), out / stem)
            except NoFigure as reason:
                left_out.append(f"{stem} ({reason})")
    return Drawn(tuple(files), tuple(left_out))
