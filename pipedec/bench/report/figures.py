"""The figures of ``pipedec bench plot``, with the labels of their bars and lines and the small print under them.

Time per output token by prompt set (the paper's Figure 5), speed-up over the number of stages, the parts of a timestep's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from pipedec.bench.report import frames, style
from pipedec.bench.report.style import BASELINE, method_looks, pipelined, set_label, shade
from pipedec.bench.report.timeline import CATEGORIES

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
_BARS_SHARE = 0.84  # share of a prompt set's room that its bars take


def colors(variants: Sequence[frames.Variant]) -> list[str]:
    """A colour for each: the method's, and from light to dark if one method ran on pipelines of several lengths."""
    looks = method_looks(one.method for one in variants)
    lengths = {method: sorted({one.groups for one in variants if one.method == method}) for method in looks}
    return [
        shade(looks[one.method].color, lengths[one.method].index(one.groups), len(lengths[one.method])) for one in variants
    ]  # fmt: skip


def labels(variants: Sequence[frames.Variant]) -> list[str]:
    """A name for each: with the number of stages if pipelined methods ran on several, with the preset if names would be equal."""
    looks = method_looks(one.method for one in variants)
    several = len({one.groups for one in variants if pipelined(one.method)}) > 1
    names = [looks[one.method].name(one.groups if several and pipelined(one.method) else None) for one in variants]
    counts = Counter(names)
    return [f"{name} ({one.pipeline.name})" if counts[name] > 1 else name for name, one in zip(names, variants, strict=True)]


def stages_text(variants: Sequence[frames.Variant]) -> str:
    """The number of stages of those whose label does not contain it."""
    names: dict[int, list[str]] = {}
    for one, label in zip(variants, labels(variants), strict=True):
        if str(one.groups) not in label and one.groups > 1:
            names.setdefault(one.groups, []).append(label)
    return "; ".join(f"{', '.join(several)}: {groups} stages" for groups, several in names.items())


def tree_text(variants: Iterable[frames.Variant]) -> str:
    """The tree of pipelined methods; empty if they differ."""
    trees = {(one.tree.width, one.tree.children) for one in variants if pipelined(one.method) and one.tree}
    return "Tree: width {}, {} children".format(*trees.pop()) if len(trees) == 1 else ""


def provenance(answers: pd.DataFrame, what: str = "method") -> str:
    """Where the figures come from, in one line; ``what`` is what a variant is in that figure.

    Greedy and stochastic answers of a variant are counted each by themselves.
    """
    groups = answers.groupby(["variant", answers["temperature"] == 0], observed=True)
    prompts = groups.apply(lambda found: len(found[["prompt_set", "prompt_index"]].drop_duplicates()))
    counts = f"{_span(prompts)} prompts and {_span(groups['tokens'].sum())} decoded tokens per {what}"
    emulated = [one for one in answers["variant"].unique() if one.pipeline.model]
    models = {f"{one.pipeline.model} in {one.pipeline.dtype}" for one in emulated}
    return "; ".join([_origin(answers), *sorted(models), counts])


def _origin(answers: pd.DataFrame) -> str:
    machines = " and ".join(sorted(answers["machine"].unique()))
    timing = answers["timing"].iloc[0]
    if timing == "machine":
        return f"Measured on {machines}, nothing emulated"
    ordered = sorted(answers["variant"].unique(), key=lambda it: (it.pipeline.recut, it.groups))
    emulated = f"Emulated ({', '.join(dict.fromkeys(str(one.pipeline.preset) for one in ordered))})"
    if timing == "computed":
        return f"{emulated}, computed: times by arithmetic"
    factors = answers["slow_motion"].unique()
    motion = "" if set(factors) == {1.0} else f", slow motion ×{_span(factors)}"
    return f"{emulated}, {machines}{motion}"


def _span(values: Iterable[float]) -> str:
    """One number, or the lowest and the highest."""
    ordered = sorted(set(values))
    return "–".join(f"{value:,.10g}" for value in dict.fromkeys((ordered[0], ordered[-1])))


def latency_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Bars of TPOT by prompt set, one per method and pipeline, all over the same prompts; 95 % intervals over prompts."""
    answers = frames.over_shared_cases(frames.headline(answers))
    if answers.empty:
        raise frames.NoFigure("no prompt was answered by all methods")
    shown, names, table = frames.variants(answers), frames.prompt_sets(answers), frames.by_prompt_set(answers)
    figure = style.new_figure(style.FULL_WIDTH, 2.5)
    axes = figure.add_subplot()
    width = _BARS_SHARE / len(shown)
    has_intervals = False
    for number, (one, color, label) in enumerate(zip(shown, colors(shown), labels(shown), strict=True)):
        heights = table["tpot_ms"].xs(one)
        xs = [names.index(name) + (number - (len(shown) - 1) / 2) * width for name in heights.index]
        axes.bar(xs, heights, 0.92 * width, color=color, label=label)
        own = frames.select(answers, [one])
        for x, (name, height) in zip(xs, heights.items(), strict=True):
            if (ends := frames.interval(own[own["prompt_set"] == name])) is not None:
                style.whisker(axes, x, height, ends)
                has_intervals = True
    style.dress(axes, y_label="TPOT (ms)")
    axes.set_xticks(range(len(names)), [set_label(name) for name in names])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(names) - 0.5)
    style.legend_above(figure, axes)
    notes = [
        provenance(answers), stages_text(shown), tree_text(shown), "Whiskers: 95 % interval over prompts" if has_intervals else ""
    ]  # fmt: skip
    return style.finish(figure, notes, title)


def breakdown_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Stacked bars of the ms of a timestep by phase, one per method and pipeline, from the answers that were traced."""
    traced = answers[answers["breakdown"].map(bool) & (answers["timesteps"] > 0)]
    if traced.empty:
        raise frames.NoFigure("no row has a breakdown")
    traced = frames.one_tree_each(traced)
    shown = sorted(frames.variants(traced), key=lambda one: (one.groups, one.pipeline.name))  # within a pipeline, in their order
    lengths = phases(traced).loc[shown]
    figure = style.new_figure(style.FULL_WIDTH, 0.94 + 0.22 * len(shown))
    axes = figure.add_subplot()
    pipelines = list(dict.fromkeys(one.pipeline for one in shown))
    ys = [number + _PIPELINE_GAP * pipelines.index(one.pipeline) for number, one in enumerate(shown)]
    ends = lengths.cumsum(axis="columns")
    for part in lengths:
        starts = ends[part] - lengths[part]
        bars = axes.barh(ys, lengths[part], 0.72, starts, color=PARTS.get(str(part), _OTHER_PART), label=str(part))
    totals = [f"{end:.1f}" for end in ends.iloc[:, -1]]
    axes.bar_label(bars, totals, padding=3, fontsize=style.TICK_POINTS, color=style.TEXT)
    style.dress(axes, x_label="time per timestep (ms), mean over stages", grid="x")
    looks = method_looks(one.method for one in shown)
    axes.set_yticks(ys, [f"{looks[one.method].name()}, {one.pipeline.name}" for one in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(ys[-1] + 0.6, -0.6)
    axes.margins(x=0.06)
    style.legend_above(figure, axes)
    return style.finish(figure, [provenance(traced, "bar"), tree_text(shown)], title)


def phases(traced: pd.DataFrame) -> pd.DataFrame:
    """Ms per timestep of each phase (column) and variant, mean over timesteps."""
    parts = pd.DataFrame(list(traced["breakdown"]), index=traced.index).fillna(0.0)
    parts = parts[sorted(parts, key=lambda part: (list(PARTS).index(part) if part in PARTS else len(PARTS), part))]
    sums = parts.mul(traced["timesteps"], axis="index").groupby(traced["variant"], observed=True).sum()
    return sums.div(traced.groupby("variant", observed=True)["timesteps"].sum(), axis="index")


def speedup_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Speed-up over plain pipeline parallelism on the same pipeline against the number of stages, all over the same prompts."""
    answers = frames.one_tree_each(answers)
    every = frames.variants(answers)
    paired = {one.pipeline for one in every if one.method == BASELINE} & {one.pipeline for one in every if one.method != BASELINE}
    answers = frames.select(answers, (one for one in every if one.pipeline in paired))
    answers = frames.over_shared_cases(frames.stage_sweep(answers))
    speeds = frames.by_variant(frames.means(frames.by_prompt_set(answers, [BASELINE]))[f"over {BASELINE}"])
    drawn, stages = list(speeds), sorted({one.groups for one in speeds})
    if len(stages) < 2:
        missing = f"{BASELINE} and another method on pipelines of two lengths, over prompts that all answered"
        raise frames.NoFigure(f"it needs {missing}")
    figure = style.new_figure(style.COLUMN_WIDTH, 2.5)
    axes = figure.add_subplot()
    axes.plot(stages, stages, color=style.FAINT, linewidth=1, linestyle=(0, (4, 2)), label="ideal = stages", zorder=1)
    draw_by_method(axes, speeds)
    style.dress(axes, "pipeline stages", "speed-up over PP (×)", grid="both")
    style.log_axis(axes, "x", stages)
    low, high = min(1.0, *speeds.values()), max(stages)
    style.log_axis(axes, "y", [2**power for power in range(-3, 8) if low / 2 < 2**power <= high])
    style.legend_above(figure, axes)
    own = provenance(frames.select(answers, drawn), "point")
    return style.finish(figure, [own, "Geometric mean over prompt sets", tree_text(drawn), fits_text(drawn)], title)


def draw_by_method(axes: Axes, values: dict[frames.Variant, float]) -> None:
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


def fits_text(drawn: list[frames.Variant]) -> str:
    """A note on hollow markers, if there are any."""
    hollow = "Hollow markers: the model does not fit into the memory of these devices"
    return "" if all(one.pipeline.fits for one in drawn) else hollow


Draw = Callable[[pd.DataFrame, str | None], "Figure"]


def of_greedy(draw: Draw) -> Draw:
    """``draw`` with the greedy answers alone."""
    return lambda answers, title: draw(frames.greedy(answers), title)


def of_methods(draw: Draw) -> Draw:
    """``draw``, which compares methods, with one BiTA if there are several."""
    return lambda answers, title: draw(frames.one_bita(answers), title)


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

    With answers of several timings there is a figure of each (NAME-measured.png, …): one figure never mixes them. Raises
    UserError if matplotlib is not installed, or a file cannot be written.
    """
    files: list[Path] = []
    left_out = []
    for name, draw in figures.items():
        for timing, answers in studies.items():
            stem = name if len(studies) == 1 else f"{name}-{timing}"
            try:
                files += style.save(draw(answers, title), out / stem)
            except frames.NoFigure as reason:
                left_out.append(f"{stem} ({reason})")
    return Drawn(tuple(files), tuple(left_out))
