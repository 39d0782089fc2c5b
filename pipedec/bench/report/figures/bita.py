"""Figures of BiTA: against the number of prompt tokens (BiTA Figure 8), and of masks (BiTA Figure 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from pipedec.bench.report.ablations import Ablation, by_masks, by_prompt_tokens, fixed_text
from pipedec.bench.report.captions import provenance
from pipedec.bench.report.figures.style import FULL_WIDTH, TEXT, TICK_POINTS, dress, finish, log_axis, new_figure
from pipedec.bench.report.frames import at, prompt_sets
from pipedec.bench.report.methods import BASELINE
from pipedec.bench.report.prompt_sets import PROMPT_SETS
from pipedec.bench.report.statistics import by_prompt_set, means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D31")
_MARKERS = ("o", "^", "s", "v", "D", "P", "X")


def prompt_tokens_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Speed-up and tokens per pass against the length of a deep prompt, one line per prompt set and one of their mean."""
    ablation = by_prompt_tokens(answers)
    figure, panels = _draw(ablation, "prompt tokens")
    for axes in panels:
        log_axis(axes, "x", list(ablation.points))
    return finish(figure, _notes(ablation), title)


def masks_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Speed-up and tokens per pass against the number of masks used, one line per prompt set and one of their mean."""
    ablation = by_masks(answers)
    figure, panels = _draw(ablation, "masks used")
    for axes in panels:
        axes.set_xticks(list(ablation.points))
    return finish(figure, _notes(ablation), title)


def _draw(ablation: Ablation[int], x_label: str) -> tuple[Figure, list[Axes]]:
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
            heights = [at(table, point).loc[name, column] for point in ablation.points.values()]
            axes.plot(values, heights, linewidth=1.1, markersize=4, label=PROMPT_SETS.get(name, name), **look)
        if len(names) > 1:
            heights = [at(mean, point)[column] for point in ablation.points.values()]
            axes.plot(values, heights, color=TEXT, linewidth=2.2, label="mean", zorder=3)
        dress(axes, x_label, label)
    panels[1].legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=TICK_POINTS, labelcolor=TEXT, handlelength=1.8
    )
    return figure, panels


def _notes(ablation: Ablation[int]) -> list[str]:
    groups = next(iter(ablation.points.values())).groups
    stages = f"{groups} stages" if groups > 1 else ""
    geometric = "Means: geometric over prompt sets" if len(prompt_sets(ablation.answers)) > 1 else ""
    return [provenance(ablation.answers, "point"), stages, fixed_text(ablation.points.values()), geometric]
