"""Which answers figures and tables compare: the ablations of BiTA, and greedy beside stochastic decoding (the paper's Figure 7).

In an ablation all points are on one pipeline and differ in one property alone; all are over the prompts that every one of them
and plain pipeline parallelism answered. Knows the frame of answers (``frames``), neither tables nor figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pandas as pd
from msgspec.structs import replace

from pipedec.bench.report.frames import (
    REFERENCE_GROUPS,
    REFERENCE_TREE,
    SAMPLING,
    NoFigure,
    Variant,
    bita_preference,
    count_answers,
    greedy,
    one_bita,
    one_tree_each,
    over_shared_cases,
    select,
    totals,
    variants,
)
from pipedec.bench.report.style import BASELINE
from pipedec.bench.sweep.rows import BITA, PipelineColumns, TrainedBita, Tree

PROMPTINGS = ("none", "shallow", "deep")  # in the order of BiTA Table 3
_SHAPES = ("straightforward", "full", "efficient", "likeliest")  # the first three in the order of BiTA Table 4

Value = TypeVar("Value")


def over_equal_cases(answers: pd.DataFrame) -> pd.DataFrame:
    """The cases that all variants have answered."""
    return answers[answers.groupby("case")["variant"].transform("nunique") == answers["variant"].nunique()]


def at(table: Any, variant: Variant) -> Any:
    """The part of a table or column whose index begins with this variant, without that level of the index."""
    return table.xs(variant)


def spread(answers: pd.DataFrame, statistic: str) -> tuple[float, float] | None:
    """The lowest and the highest of a column of ``totals`` over repeats, each over all prompts; None for a single repeat."""
    repeats = totals(answers, "draw")[statistic].fillna(0.0)
    return (float(repeats.min()), float(repeats.max())) if len(repeats) > 1 else None


@dataclass(frozen=True)
class Ablation(Generic[Value]):
    """Variants of ``bita`` on one pipeline, by the property in which they differ.

    ``answers`` are theirs and those of plain pipeline parallelism there, to equal prompts.
    """

    points: dict[Value, Variant]
    answers: pd.DataFrame


def against_baseline(answers: pd.DataFrame) -> list[Ablation[str]]:
    """That one BiTA on every pipeline on which plain pipeline parallelism ran, too; by the pipeline's name."""
    found = variants(one_bita(answers))
    bases = {one.pipeline: one for one in found if one.method == BASELINE}
    pairs = [(one, bases[one.pipeline]) for one in found if one.method == BITA and one.pipeline in bases]
    ablations = [Ablation({one.pipeline.name: one}, over_equal_cases(select(answers, (one, base)))) for one, base in pairs]
    return [ablation for ablation in ablations if len(ablation.answers)]


def by_prompt_tokens(answers: pd.DataFrame) -> Ablation[int]:
    """Deep prompts of different lengths, with the same masks and tree (BiTA Figure 8). Raises NoFigure if there are none."""
    entries = [
        (trained.prompt_tokens, (trained.masks, tree), one)
        for one, trained, tree in _of_bita(variants(answers))
        if trained.prompting == "deep" and trained.prompt_tokens
    ]
    return _ablation(answers, entries, int, "deep prompts of two lengths")


def by_masks(answers: pd.DataFrame) -> Ablation[int]:
    """Different numbers of masks used, of the same BiTA and shape of tree (BiTA Figure 9). Raises NoFigure if there are none."""
    members = _of_bita(variants(answers))
    entries = [(tree.depth or 0, (trained, replace(tree, depth=None)), one) for one, trained, tree in members]
    return _ablation(answers, entries, int, "trees of two depths")


def by_prompting(answers: pd.DataFrame) -> Ablation[str]:
    """No prompt, a shallow and a deep one of a length, with equal masks and tree (BiTA Table 3). Raises NoFigure without two."""
    members = list(_of_bita(variants(answers)))
    lengths = {trained.prompt_tokens for _, trained, _ in members if trained.prompting != "none"} or {0}
    entries = [
        (trained.prompting, (trained.masks, tree, length), one)
        for one, trained, tree in members
        for length in sorted(lengths)
        if trained.prompting == "none" or trained.prompt_tokens == length
    ]
    return _ablation(answers, entries, PROMPTINGS.index, "two ways of prompting")


def by_tree(answers: pd.DataFrame) -> Ablation[Tree]:
    """Different trees (shape, candidates, rows) of the same BiTA and masks (BiTA Table 4). Raises NoFigure without two."""

    def order(tree: Tree) -> Any:
        return _SHAPES.index(tree.shape or ""), tree.children, tree.rows or 0

    entries = [(tree, (trained, tree.depth), one) for one, trained, tree in _of_bita(variants(answers))]
    return _ablation(answers, entries, order, "two trees")


def fixed_text(points: Iterable[Variant]) -> str:
    """The properties that all of these variants of ``bita`` share, for small print."""
    members = list(_of_bita(points))
    prompts, masks = {prompt_text(trained) for _, trained, _ in members}, {trained.masks for _, trained, _ in members}
    shapes, depths = {replace(tree, depth=None) for _, _, tree in members}, {tree.depth for _, _, tree in members}
    common = [*prompts] if len(prompts) == 1 else []
    common += [f"{count} masks trained" for count in masks if len(masks) == 1]
    common += [f"{count} used" for count in depths if len(depths) == 1]
    common += [f"{tree_name(tree)} tree, {tree.children} candidates each" for tree in shapes if len(shapes) == 1]
    return f"BiTA: {', '.join(common)}"


def prompt_text(trained: TrainedBita) -> str:
    """The prompt of a BiTA, for people."""
    return "no prompt" if trained.prompting == "none" else f"{trained.prompting} prompt of {trained.prompt_tokens} tokens"


def tree_name(tree: Tree) -> str:
    """The shape, for people."""
    return f"{tree.shape} {tree.rows}-row" if tree.rows else str(tree.shape)


def _of_bita(members: Iterable[Variant]) -> Iterator[tuple[Variant, TrainedBita, Tree]]:
    for one in members:
        if one.method == BITA and one.bita and one.tree:
            yield one, one.bita, one.tree


def _ablation(
    answers: pd.DataFrame, entries: Iterable[tuple[Value, object, Variant]], order: Callable[[Value], Any], what: str
) -> Ablation[Value]:
    """Choose, among variants that differ in their value alone (the second of an entry is all else), those with most values.

    Of two variants with one value, the one with more answers is taken. Values are sorted by ``order``.
    """
    bases = {one.pipeline: one for one in variants(answers) if one.method == BASELINE}
    counts = count_answers(answers)
    groups: dict[tuple[PipelineColumns, object], dict[Value, Variant]] = {}
    for value, fixed, one in entries:
        if one.pipeline in bases:
            group = groups.setdefault((one.pipeline, fixed), {})
            group[value] = max(group.get(value, one), one, key=lambda each: counts[each])

    def rank(group: dict[Value, Variant]) -> tuple[object, ...]:
        """Most points; of equals the BiTA and trees that are preferred, then the paper's pipeline."""
        members = list(group.values())
        preferred, pipeline = sum(bita_preference(one.bita, one.tree) for one in members), members[0].pipeline
        is_papers = not pipeline.recut, pipeline.groups == REFERENCE_GROUPS, pipeline.groups
        return len(members), preferred, *is_papers, sum(counts[one] for one in members)

    best = max(groups.values(), key=rank, default={})
    if len(best) < 2:
        raise NoFigure(f"it needs bita with {what}, everything else being equal, and {BASELINE} on the same pipeline")
    points = {value: best[value] for value in sorted(best, key=order)}
    base = bases[next(iter(points.values())).pipeline]
    equal = over_equal_cases(select(answers, [*points.values(), base]))
    if equal.empty:
        raise NoFigure(f"no prompt was answered by {BASELINE} and by all of the {len(points)} BiTA that differ in one property")
    return Ablation(points, equal)


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
    are those of the paper's sampling, else of the one with most answers. Raises NoFigure if answers of one kind are missing, or
    no question was answered both ways.
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
