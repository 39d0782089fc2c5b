"""Greedy beside stochastic decoding: which answers are compared, and bars of them by prompt set (the paper's Figure 7).

Knows rows of one timing (``sweep_rows.studies``) and draws them; it reads and writes no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipedec.bench.figure_methods import method_looks, shade
from pipedec.bench.figure_series import (
    REFERENCE_GROUPS,
    REFERENCE_TREE,
    NoFigure,
    Series,
    Totals,
    chosen_series,
    over_shared_cases,
    prompt_set_rank,
    provenance,
    spread,
    tree_text,
)
from pipedec.bench.figure_style import FULL_WIDTH, dress, finish, labels, legend_above, new_figure, stages_text, whisker
from pipedec.bench.sweep_rows import PROMPT_SETS, Pipeline, SweepRow, greedy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_SAMPLING = (0.6, 80, 0.9)  # temperature, top-k, top-p (§4.3.3)
_BARS_SHARE = 0.84  # of the room of a prompt set


@dataclass(frozen=True)
class BothWays:
    """The answers of one method to the same questions, greedy and stochastic."""

    greedy: Series
    stochastic: Series

    @property
    def ways(self) -> dict[str, Series]:
        return {"greedy": self.greedy, "stochastic": self.stochastic}


def greedy_and_stochastic(rows: Sequence[SweepRow]) -> list[BothWays]:
    """Every method with a tree that decoded both ways, all over the same prompts and, of stochastic answers, the same draws.

    On one pipeline and with one size of tree: those that most methods have in common, of equals the paper's. Stochastic answers
    are those of the paper's sampling, else of the one with most answers.

    Raises:
        NoFigure: answers of one kind are missing, or no question was answered both ways.
    """
    kinds = {"greedy": greedy(rows), "stochastic": _of_one_sampling(rows)}
    kinds = {kind: [row for row in found if row.tree is not None] for kind, found in kinds.items()}
    for kind, found in kinds.items():
        if not found:
            raise NoFigure(f"no row holds a {kind} answer of a method with a tree")
    known = [dict.fromkeys((_setting(row), row.method) for row in found) for found in kinds.values()]
    both = [key for key in known[0] if key in known[1]]
    setting = _most_common([setting for setting, _ in both])
    ways = [
        over_shared_cases(chosen_series(row for row in found if _setting(row) == setting and (setting, row.method) in both))
        for found in kinds.values()
    ]
    pairs = [_over_same_questions(one, other) for one in ways[0] for other in ways[1] if other.method == one.method]
    pairs = [pair for pair in pairs if pair.greedy.rows]
    if not pairs:
        raise NoFigure("no method with a tree answered the same prompt both greedily and stochastically on the same pipeline")
    return pairs


def stochastic_figure(rows: Sequence[SweepRow], title: str | None = None) -> Figure:
    """Bars of ms per token, and of hit rates below, by prompt set: one per method in its colour, greedy, a light one, stochastic.

    Whiskers are the lowest and the highest repeat.
    """
    pairs = greedy_and_stochastic(rows)
    bars = _bars(pairs)
    figure = new_figure(FULL_WIDTH, 3.8)
    latency, hits = figure.subplots(2, 1, sharex=True)
    _draw(latency, bars, lambda totals: totals.ms_per_token)
    _draw(hits, bars, lambda totals: 100 * (totals.hit_rate or 0.0))
    dress(latency, y_label="latency per token (ms)")
    dress(hits, y_label="hit rate (%)")
    names = _prompt_sets(pairs)
    hits.set_xticks(range(len(names)), [PROMPT_SETS.get(name, name.replace("_", " ")) for name in names])
    hits.set_xlim(-0.5, len(names) - 0.5)
    hits.set_ylim(0, 100)
    for axes in (latency, hits):
        axes.tick_params(axis="x", length=0)
    legend_above(figure, latency, even=True)
    series = [one for pair in pairs for one in pair.ways.values()]
    repeated = any(spread(one, lambda totals: totals.ms_per_token) for one in series)
    notes = [
        provenance(series, "method and decoding"),
        stages_text([pair.greedy for pair in pairs]),
        tree_text(series),
        sampling_text(pairs),
        "Whiskers: lowest and highest repeat" if repeated else "",
    ]
    return finish(figure, notes, title)


def sampling_text(pairs: Sequence[BothWays]) -> str:
    """How the stochastic answers were drawn, for small print."""
    temperature, top_k, top_p = pairs[0].stochastic.rows[0].sampling
    repeats = pairs[0].stochastic.num_repeats
    drawn = f"Stochastic: temperature {temperature:g}, top-k {top_k or 'off'}, top-p {top_p:g}"
    return f"{drawn}, {repeats} repeats" if repeats > 1 else drawn


@dataclass(frozen=True)
class _Bars:
    """The bars of one method decoding one way: by the number of the prompt set, and how they look."""

    sets: dict[int, Series]
    offset: float
    width: float
    color: str
    label: str


def _bars(pairs: Sequence[BothWays]) -> list[_Bars]:
    names, width = _prompt_sets(pairs), _BARS_SHARE / (2 * len(pairs))
    looks = method_looks(pair.greedy.method for pair in pairs)
    bars: list[_Bars] = []
    for pair, label in zip(pairs, labels([pair.greedy for pair in pairs]), strict=True):
        color = looks[pair.greedy.method].color
        for (way, one), look in zip(pair.ways.items(), (color, shade(color, 0, 2)), strict=True):
            offset = (len(bars) - len(pairs) + 0.5) * width
            sets = {names.index(name): part for name, part in one.sets.items()}
            bars.append(_Bars(sets, offset, width, look, f"{label}, {way}"))
    return bars


def _draw(axes: Axes, bars: Sequence[_Bars], figure: Callable[[Totals], float]) -> None:
    for one in bars:
        places = [index + one.offset for index in one.sets]
        heights = [figure(part.totals) for part in one.sets.values()]
        axes.bar(places, heights, 0.92 * one.width, color=one.color, label=one.label)
        for place, height, part in zip(places, heights, one.sets.values(), strict=True):
            if (ends := spread(part, figure)) is not None:
                whisker(axes, place, height, ends)


def _prompt_sets(pairs: Sequence[BothWays]) -> list[str]:
    return sorted({name for pair in pairs for name in pair.greedy.sets}, key=prompt_set_rank)


def _of_one_sampling(rows: Sequence[SweepRow]) -> list[SweepRow]:
    drawn = [row for row in rows if not row.is_greedy]
    counts = Counter(row.sampling for row in drawn)
    sampling = max(counts, key=lambda it: (it == PAPER_SAMPLING, counts[it]), default=None)
    return [row for row in drawn if row.sampling == sampling]


_Setting = tuple[Pipeline, tuple[int | None, int | None]]


def _setting(row: SweepRow) -> _Setting:
    """What all bars of the picture have in common: the pipeline, and the tree's width and children.

    A method that finds its own limits, or has a tree of another kind, stands beside the paper's.
    """
    assert row.tree is not None
    limits = (row.tree.width, row.tree.children)
    return row.pipeline, REFERENCE_TREE if limits == (None, None) or row.bita else limits


def _most_common(settings: Sequence[_Setting]) -> _Setting | None:
    counts = Counter(settings)

    def rank(setting: _Setting) -> tuple[object, ...]:
        pipeline, limits = setting
        is_papers = limits == REFERENCE_TREE, not pipeline.recut, pipeline.groups == REFERENCE_GROUPS
        return counts[setting], *is_papers, pipeline.groups

    return max(counts, key=rank, default=None)


def _over_same_questions(one: Series, other: Series) -> BothWays:
    shared = {row.question for row in one.rows} & {row.question for row in other.rows}
    cut = [way.only({row.case for row in way.rows if row.question in shared}) for way in (one, other)]
    return BothWays(*cut)
