"""Greedy beside stochastic decoding (the paper's Figure 7): which answers are compared.

Knows the frame of answers (``frames``), neither tables nor figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from pipedec.bench.report.frames import (
    REFERENCE_GROUPS,
    REFERENCE_TREE,
    SAMPLING,
    NoFigure,
    Variant,
    greedy,
    one_tree_each,
    over_shared_cases,
    select,
    variants,
)
from pipedec.bench.sweep.rows import PipelineColumns

PAPER_SAMPLING = (0.6, 80, 0.9)  # temperature, top-k, top-p (§4.3.3)

_Setting = tuple[PipelineColumns, tuple[int | None, int | None]]


@dataclass(frozen=True)
class BothWays:
    """The answers of several methods to the same questions, greedy and stochastic."""

    greedy: pd.DataFrame
    stochastic: pd.DataFrame

    @property
    def ways(self) -> dict[str, pd.DataFrame]:
        return {"greedy": self.greedy, "stochastic": self.stochastic}

    @property
    def answers(self) -> pd.DataFrame:
        return pd.concat([self.greedy, self.stochastic])

    @property
    def methods(self) -> list[str]:
        return [one.method for one in variants(self.greedy)]

    @property
    def sampling_text(self) -> str:
        """How the stochastic answers were sampled, for small print."""
        temperature, top_k, top_p = self.stochastic[SAMPLING].iloc[0]
        repeats = self.stochastic["draw"].nunique()
        text = f"Stochastic: temperature {temperature:g}, top-k {int(top_k) or 'off'}, top-p {top_p:g}"
        return f"{text}, {repeats} repeats" if repeats > 1 else text


def greedy_and_stochastic(answers: pd.DataFrame) -> BothWays:
    """Every method with a tree that decoded both ways, all over the same prompts and, of stochastic answers, the same draws.

    On one pipeline and with one size of tree: those that most methods have in common, of equals the paper's. Stochastic answers
    are those of the paper's sampling, else of the one with most answers.

    Raises:
        NoFigure: answers of one kind are missing, or no question was answered both ways.
    """
    with_tree = select(answers, (one for one in variants(answers) if one.tree is not None)).sort_index()
    kinds = {"greedy": greedy(with_tree), "stochastic": _of_one_sampling(with_tree)}
    for kind, found in kinds.items():
        if found.empty:
            raise NoFigure(f"no row holds a {kind} answer of a method with a tree")
    known = [dict.fromkeys((_setting(one), one.method) for one in variants(found)) for found in kinds.values()]
    both = [key for key in known[0] if key in known[1]]
    setting = _most_common([setting for setting, _ in both])
    ways = []
    for found in kinds.values():
        kept = [one for one in variants(found) if _setting(one) == setting and (setting, one.method) in both]
        ways.append(over_shared_cases(one_tree_each(select(found, kept).sort_values("variant", kind="stable"))))
    asked = [pd.MultiIndex.from_frame(way[["method", "question"]]) for way in ways]
    compared = BothWays(ways[0][asked[0].isin(asked[1])], ways[1][asked[1].isin(asked[0])])
    if compared.greedy.empty:
        raise NoFigure("no method with a tree answered the same prompt both greedily and stochastically on the same pipeline")
    return compared


def _of_one_sampling(answers: pd.DataFrame) -> pd.DataFrame:
    sampled = answers[answers["temperature"] > 0]
    samplings = list(sampled[SAMPLING].itertuples(index=False, name=None))
    counts = Counter(samplings)
    chosen = max(counts, key=lambda it: (it == PAPER_SAMPLING, counts[it]), default=None)
    return sampled[[sampling == chosen for sampling in samplings]]


def _setting(one: Variant) -> _Setting:
    """The setting that all compared answers share: the pipeline, and the tree's width and children.

    A method that finds its own limits, or has a tree of another kind, is compared with the paper's.
    """
    assert one.tree is not None
    limits = (one.tree.width, one.tree.children)
    return one.pipeline, REFERENCE_TREE if limits == (None, None) or one.bita else limits


def _most_common(settings: Sequence[_Setting]) -> _Setting | None:
    counts = Counter(settings)

    def rank(setting: _Setting) -> tuple[object, ...]:
        pipeline, limits = setting
        is_papers = limits == REFERENCE_TREE, not pipeline.recut, pipeline.groups == REFERENCE_GROUPS
        return counts[setting], *is_papers, pipeline.groups

    return max(counts, key=rank, default=None)
