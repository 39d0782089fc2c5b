"""The pictures of bars: latency per token by prompt set (the paper's Figure 5), and where the time of a timestep goes.

Knows rows of one timing (``sweep_rows.studies``) and draws them; it reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipedec.bench.figure_methods import method_looks
from pipedec.bench.figure_series import (
    NoFigure,
    Series,
    chosen_series,
    headline_series,
    interval,
    over_shared_cases,
    prompt_set_rank,
    provenance,
    tree_text,
)
from pipedec.bench.figure_style import (
    FULL_WIDTH,
    TEXT,
    TICK_POINTS,
    colors,
    dress,
    finish,
    labels,
    legend_above,
    new_figure,
    stages_text,
    whisker,
)
from pipedec.bench.sweep_rows import PROMPT_SETS, SweepRow
from pipedec.bench.timeline import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the bottom of a bar to its end: work first, idleness last.
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


def latency_figure(rows: Sequence[SweepRow], title: str | None = None) -> Figure:
    """Bars of ms per token by prompt set, one per method and pipeline, all over the same prompts; 95 % intervals over prompts."""
    series = over_shared_cases(headline_series(rows))
    if not series:
        raise NoFigure("no prompt was answered by all methods")
    names = sorted({name for one in series for name in one.sets}, key=prompt_set_rank)
    figure = new_figure(FULL_WIDTH, 2.5)
    axes = figure.add_subplot()
    width = _BARS_SHARE / len(series)
    for place, (one, color, label) in enumerate(zip(series, colors(series), labels(series), strict=True)):
        sets = one.sets
        places = [index + (place - (len(series) - 1) / 2) * width for index, name in enumerate(names) if name in sets]
        heights = [part.totals.ms_per_token for part in sets.values()]
        axes.bar(places, heights, 0.92 * width, color=color, label=label)
        _draw_intervals(axes, places, list(sets.values()))
    dress(axes, y_label="latency per token (ms)")
    axes.set_xticks(range(len(names)), [PROMPT_SETS.get(name, name.replace("_", " ")) for name in names])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(names) - 0.5)
    legend_above(figure, axes)
    intervals = any(interval(part) for one in series for part in one.sets.values())
    notes = [
        provenance(series),
        stages_text(series),
        tree_text(series),
        "Whiskers: 95 % interval over prompts" if intervals else "",
    ]
    return finish(figure, notes, title)


def breakdown_figure(rows: Sequence[SweepRow], title: str | None = None) -> Figure:
    """Stacked bars of the ms of a timestep by what they go to, one per method and pipeline, from the rows that were traced."""
    series = chosen_series(row for row in rows if row.breakdown and row.timesteps)
    if not series:
        raise NoFigure("no row has a breakdown")
    series = sorted(series, key=lambda one: (one.groups, one.pipeline.name))  # within a pipeline, methods keep their order
    figure = new_figure(FULL_WIDTH, 0.94 + 0.22 * len(series))
    axes = figure.add_subplot()
    lengths = [breakdown(one) for one in series]
    parts = sorted({part for length in lengths for part in length}, key=lambda part: (part not in PARTS, part))
    parts = [part for part in PARTS if part in parts] + [part for part in parts if part not in PARTS]
    pipelines = list(dict.fromkeys(one.pipeline for one in series))
    places = [place + _PIPELINE_GAP * pipelines.index(one.pipeline) for place, one in enumerate(series)]
    starts = [0.0] * len(series)
    for part in parts:
        widths = [length.get(part, 0.0) for length in lengths]
        axes.barh(places, widths, 0.72, starts, color=PARTS.get(part, _OTHER_PART), label=part)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, end in zip(places, starts, strict=True):
        axes.annotate(
            f"{end:.1f}", (end, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=TICK_POINTS, color=TEXT
        )
    dress(axes, x_label="time per timestep (ms), mean over stages", grid="x")
    looks = method_looks(one.method for one in series)
    axes.set_yticks(places, [f"{looks[one.method].name()}, {one.pipeline.name}" for one in series])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.margins(x=0.06)
    legend_above(figure, axes)
    return finish(figure, [provenance(series, "bar"), tree_text(series)], title)


def breakdown(series: Series) -> dict[str, float]:
    """Ms per timestep of each part, mean over timesteps."""
    timesteps = sum(row.timesteps for row in series.rows)
    sums: dict[str, float] = {}
    for row in series.rows:
        for part, ms in (row.breakdown or {}).items():
            sums[part] = sums.get(part, 0.0) + ms * row.timesteps
    return {part: total / timesteps for part, total in sums.items()}


def _draw_intervals(axes: Axes, places: Sequence[float], parts: Sequence[Series]) -> None:
    for place, part in zip(places, parts, strict=True):
        if (ends := interval(part)) is not None:
            whisker(axes, place, part.totals.ms_per_token, ends)
