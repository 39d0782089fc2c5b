"""The radar of hit rates by prompt set (the paper's Figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, pi
from typing import TYPE_CHECKING, Any

import pandas as pd

from pipedec.bench.report.captions import colors, labels, provenance, stages_text, tree_text
from pipedec.bench.report.figures.style import GRID, TEXT, TICK_POINTS, finish, new_figure
from pipedec.bench.report.frames import at, by_variant, prompt_sets, select, variants
from pipedec.bench.report.methods import method_looks
from pipedec.bench.report.missing import NoFigure
from pipedec.bench.report.prompt_sets import set_label
from pipedec.bench.report.selection import headline, over_shared_cases
from pipedec.bench.report.statistics import by_prompt_set, totals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    complete = [one for one in variants(answers) if list(at(rates, one).index) == names]
    figure = new_figure(5.4, 3.3)
    figure.set_layout_engine("none")  # which does not see how far the names around a circle reach
    axes = figure.add_axes((0.19, 0.17, 0.42, 0.68), projection="polar")
    spokes = [2 * pi * index / len(names) for index in range(len(names))]
    looks = method_looks(one.method for one in complete)
    for one, color, label in zip(complete, colors(complete), labels(complete), strict=True):
        heights = list(at(rates, one))
        axes.plot(
            [*spokes, spokes[0]], [*heights, heights[0]], color=color, linewidth=1.2, marker=looks[one.method].marker,
            markersize=3, label=label, clip_on=False,
        )  # fmt: skip
    lowest = _dress(axes, spokes, names, min(at(rates, one).min() for one in complete))
    figure.legend(loc="center left", bbox_to_anchor=(0.705, 0.5), frameon=False, fontsize=TICK_POINTS, labelcolor=TEXT)
    notes = [f"Hit rate (%); the centre is {lowest} %", provenance(select(answers, complete))]
    return finish(figure, [*notes, stages_text(complete), tree_text(complete)], title)


def _dress(axes: Any, spokes: Sequence[float], names: Sequence[str], least: float) -> int:
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
