"""The ablations of the BiTA paper: which answers of ``bita`` are compared.

In an ablation all points are on one pipeline and differ in one property alone; all are over the prompts that every one of them
and plain pipeline parallelism answered. Knows the frame of answers (``frames``), neither tables nor figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pandas as pd
from msgspec.structs import replace

from pipedec.bench.report.frames import (
    REFERENCE_GROUPS,
    NoFigure,
    Variant,
    bita_preference,
    count_answers,
    one_bita,
    over_equal_cases,
    select,
    variants,
)
from pipedec.bench.report.style import BASELINE
from pipedec.bench.sweep.rows import BITA, PROMPTINGS, PipelineColumns, TrainedBita, Tree

_SHAPES = ("straightforward", "full", "efficient", "likeliest")  # the first three in the order of BiTA Table 4

Value = TypeVar("Value")


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
    entries = [
        (tree.depth or 0, (trained, replace(tree, depth=None)), one) for one, trained, tree in _of_bita(variants(answers))
    ]  # fmt: skip
    return _ablation(answers, entries, int, "trees of two depths")


def by_prompting(answers: pd.DataFrame) -> Ablation[str]:
    """No prompt, a shallow and a deep one of one length, with the same masks and tree (BiTA Table 3).

    Raises:
        NoFigure: there are not two of them.
    """
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
    """Different shapes of tree, numbers of candidates and of rows, of the same BiTA and masks (BiTA Table 4).

    Raises:
        NoFigure: there are not two of them.
    """
    entries = [(tree, (trained, tree.depth), one) for one, trained, tree in _of_bita(variants(answers))]
    return _ablation(
        answers, entries, lambda tree: (_SHAPES.index(tree.shape or ""), tree.children, tree.rows or 0), "two trees"
    )  # fmt: skip


def fixed_text(points: Iterable[Variant]) -> str:
    """The properties that all of these variants of ``bita`` share, for small print."""
    members = list(_of_bita(points))
    prompts, masks = {trained.prompt for _, trained, _ in members}, {trained.masks for _, trained, _ in members}
    shapes, depths = {replace(tree, depth=None) for _, _, tree in members}, {tree.depth for _, _, tree in members}
    common = [*prompts] if len(prompts) == 1 else []
    common += [f"{count} masks trained" for count in masks if len(masks) == 1]
    common += [f"{count} used" for count in depths if len(depths) == 1]
    common += [f"{tree_name(tree)} tree, {tree.children} candidates each" for tree in shapes if len(shapes) == 1]
    return f"BiTA: {', '.join(common)}"


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
    best = max(groups.values(), key=lambda group: _rank(group, counts), default={})
    if len(best) < 2:
        raise NoFigure(f"it needs bita with {what}, everything else being equal, and {BASELINE} on the same pipeline")
    points = {value: best[value] for value in sorted(best, key=order)}
    base = bases[next(iter(points.values())).pipeline]
    equal = over_equal_cases(select(answers, [*points.values(), base]))
    if equal.empty:
        raise NoFigure(f"no prompt was answered by {BASELINE} and by all of the {len(points)} BiTA that differ in one property")
    return Ablation(points, equal)


def _rank(group: dict[Value, Variant], counts: dict[Variant, int]) -> tuple[object, ...]:
    """Ranks ablations: most points; of equals by the BiTA and trees that are preferred, then the paper's pipeline."""
    members = list(group.values())
    preferred = sum(bita_preference(one.bita, one.tree) for one in members)
    pipeline = members[0].pipeline
    is_papers = not pipeline.recut, pipeline.groups == REFERENCE_GROUPS, pipeline.groups
    return len(members), preferred, *is_papers, sum(counts[one] for one in members)
