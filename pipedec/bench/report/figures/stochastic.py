"""The figure of greedy beside stochastic decoding: bars by prompt set (the paper's Figure 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from pipedec.bench.report.captions import labels, provenance, stages_text, tree_text
from pipedec.bench.report.decoding import BothWays, greedy_and_stochastic
from pipedec.bench.report.figures.style import FULL_WIDTH, dress, finish, legend_above, new_figure, whisker
from pipedec.bench.report.frames import at, prompt_sets, variants
from pipedec.bench.report.methods import method_looks, shade
from pipedec.bench.report.prompt_sets import set_label
from pipedec.bench.report.statistics import by_prompt_set, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BARS_SHARE = 0.84  # of the room of a prompt set


def stochastic_figure(answers: pd.DataFrame, title: str | None = None) -> Figure:
    """Bars of TPOT, and of hit rates below, by prompt set: per method a greedy one and, lighter, a stochastic one.

    Whiskers are the lowest and the highest repeat.
    """
    both = greedy_and_stochastic(answers)
    figure = new_figure(FULL_WIDTH, 3.8)
    latency, hits = figure.subplots(2, 1, sharex=True)
    _draw(latency, both, "tpot_ms")
    _draw(hits, both, "hit_rate", scale=100.0)
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


def _draw(axes: Axes, both: BothWays, column: str, scale: float = 1.0) -> None:
    """Bars of a column of ``by_prompt_set``."""
    shown, names = variants(both.greedy), prompt_sets(both.greedy)
    tables = {way: by_prompt_set(found)[column].fillna(0.0) * scale for way, found in both.ways.items()}
    looks = method_looks(both.methods)
    width, bars = _BARS_SHARE / (2 * len(shown)), 0
    for method, label in zip(both.methods, labels(shown), strict=True):
        color = looks[method].color
        for (way, found), look in zip(both.ways.items(), (color, shade(color, 0, 2)), strict=True):
            own = found[found["method"] == method]
            heights = at(tables[way], variants(own)[0])
            xs = [names.index(name) + (bars - len(shown) + 0.5) * width for name in heights.index]
            axes.bar(xs, heights, 0.92 * width, color=look, label=f"{label}, {way}")
            for x, (name, height) in zip(xs, heights.items(), strict=True):
                if (ends := spread(own[own["prompt_set"] == name], column)) is not None:
                    whisker(axes, x, height, (scale * ends[0], scale * ends[1]))
            bars += 1
