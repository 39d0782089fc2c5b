"""Which answers of ``bita`` are compared: the ablations of the BiTA paper, and the one BiTA that other pictures show.

In an ablation all series stand on one pipeline and differ in one thing alone; all are over the prompts that every one of them and
plain pipeline parallelism answered. Knows series (``figure_series``), neither tables nor pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pipedec.bench.figure_methods import BASELINE
from pipedec.bench.figure_series import REFERENCE_GROUPS, NoFigure, Series, Totals, all_series, geometric_mean, speedups
from pipedec.bench.sweep_rows import BITA, PROMPTINGS, Pipeline, SweepRow, TrainedBita, Tree
from pipedec.methods import BitaOptions

PAPER_PROMPT = ("deep", 16)  # prompting and prompt tokens (BiTA §4.1)
PAPER_TREE = ("efficient", 5)  # shape and candidates of each mask
_SHAPES = ("straightforward", "full", "efficient", "likeliest")  # the first three in the order of BiTA Table 4
_DEFAULT_SHAPE = BitaOptions().shape

Value = TypeVar("Value")


@dataclass(frozen=True)
class Compared(Generic[Value]):
    """Series of ``bita`` on one pipeline, by what they differ in, and plain pipeline parallelism there: equal prompts for all."""

    points: dict[Value, Series]
    baseline: Series

    @property
    def series(self) -> list[Series]:
        return [*self.points.values(), self.baseline]

    def speedups(self, value: Value) -> dict[str, float]:
        """Over plain pipeline parallelism, by prompt set."""
        return speedups(self.points[value], [self.baseline])

    def tokens_per_pass(self, value: Value) -> dict[str, float]:
        """By prompt set. The first token of an answer is the prefill's and not counted."""
        return {name: tokens_per_pass(part.totals) for name, part in self.points[value].sets.items()}


def tokens_per_pass(totals: Totals) -> float:
    """Accepted tokens of a pass, the target's own included: every pass of ``bita`` begins with a miss."""
    return totals.tokens / max(1, totals.misses)


def shown(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows for pictures that compare methods: those of ``bita`` by one BiTA with one tree alone.

    It is one with the paper's prompt and a tree of the shape that ``bita`` takes by itself, where these are there; else the one
    with most answers, of equals the fastest.
    """
    answers: dict[tuple[TrainedBita | None, Tree | None], list[SweepRow]] = {}
    for row in rows:
        if row.method == BITA:
            answers.setdefault((row.bita, row.tree), []).append(row)

    def preference(choice: tuple[TrainedBita | None, Tree | None]) -> tuple[object, ...]:
        found = answers[choice]
        return -_preference(*choice), -len(found), Totals.of(found).ms_per_token

    chosen = min(answers, key=preference, default=None)
    return [row for row in rows if row.method != BITA or (row.bita, row.tree) == chosen]


def against_baseline(rows: Sequence[SweepRow]) -> list[Compared[str]]:
    """The ``bita`` that is shown, on every pipeline on which plain pipeline parallelism ran, too; by the pipeline's name."""
    series = all_series(shown(rows))
    bases = {one.pipeline: one for one in series if one.method == BASELINE}
    pairs = [(one, bases[one.pipeline]) for one in series if one.method == BITA and one.pipeline in bases]
    return [_over_equal_prompts({one.pipeline.name: one}, base) for one, base in pairs if one.cases & base.cases]


def by_prompt_tokens(rows: Sequence[SweepRow]) -> Compared[int]:
    """Deep prompts of different lengths, with the same masks and tree (BiTA Figure 8). Raises NoFigure if there are none."""
    entries = [
        (trained.prompt_tokens, (trained.masks, tree), one)
        for one, trained, tree in _of_bita(rows)
        if trained.prompting == "deep" and trained.prompt_tokens
    ]
    return _ablation(rows, entries, int, "deep prompts of two lengths")


def by_masks(rows: Sequence[SweepRow]) -> Compared[int]:
    """Different numbers of masks used, of the same BiTA and shape of tree (BiTA Figure 9). Raises NoFigure if there are none."""
    entries = [(tree.depth or 0, (trained, replace(tree, depth=None)), one) for one, trained, tree in _of_bita(rows)]
    return _ablation(rows, entries, int, "trees of two depths")


def by_prompting(rows: Sequence[SweepRow]) -> Compared[str]:
    """No prompt, a shallow and a deep one of one length, with the same masks and tree (BiTA Table 3).

    Raises:
        NoFigure: there are not two of them.
    """
    members = list(_of_bita(rows))
    lengths = {trained.prompt_tokens for _, trained, _ in members if trained.prompting != "none"} or {0}
    entries = [
        (trained.prompting, (trained.masks, tree, length), one)
        for one, trained, tree in members
        for length in sorted(lengths)
        if trained.prompting == "none" or trained.prompt_tokens == length
    ]
    return _ablation(rows, entries, PROMPTINGS.index, "two ways of prompting")


def by_tree(rows: Sequence[SweepRow]) -> Compared[Tree]:
    """Different shapes of tree, numbers of candidates and of rows, of the same BiTA and masks (BiTA Table 4).

    Raises:
        NoFigure: there are not two of them.
    """
    entries = [(tree, (trained, tree.depth), one) for one, trained, tree in _of_bita(rows)]
    return _ablation(rows, entries, lambda tree: (_SHAPES.index(tree.shape), tree.children, tree.rows or 0), "two trees")


def fixed_text(series: Iterable[Series]) -> str:
    """What all series of ``bita`` have in common, for small print."""
    members = list(_of_bita([row for one in series for row in one.rows]))
    prompts, masks = {trained.prompt for _, trained, _ in members}, {trained.masks for _, trained, _ in members}
    shapes, depths = {replace(tree, depth=None) for _, _, tree in members}, {tree.depth for _, _, tree in members}
    told = [*prompts] if len(prompts) == 1 else []
    told += [f"{count} masks trained" for count in masks if len(masks) == 1]
    told += [f"{count} used" for count in depths if len(depths) == 1]
    told += [f"{tree_name(tree)} tree, {tree.children} candidates each" for tree in shapes if len(shapes) == 1]
    return f"BiTA: {', '.join(told)}"


def tree_name(tree: Tree) -> str:
    """The shape, for people."""
    return f"{tree.shape} {tree.rows}-row" if tree.rows else str(tree.shape)


def mean(by_set: dict[str, float]) -> float:
    """Over prompt sets."""
    return geometric_mean(by_set.values())


def _of_bita(rows: Sequence[SweepRow]) -> Iterator[tuple[Series, TrainedBita, Tree]]:
    for one in all_series(rows):
        if one.method == BITA and one.bita and one.tree:
            yield one, one.bita, one.tree


def _ablation(
    rows: Sequence[SweepRow], entries: Iterable[tuple[Value, object, Series]], order: Callable[[Value], Any], what: str
) -> Compared[Value]:
    """Of the series that differ in their value alone (the second of an entry is all else) those with most different values.

    Of two with one value the one with more answers is taken. Values stand in ``order``.
    """
    bases = {one.pipeline: one for one in all_series(rows) if one.method == BASELINE}
    groups: dict[tuple[Pipeline, object], dict[Value, Series]] = {}
    for value, fixed, one in entries:
        if one.pipeline in bases:
            group = groups.setdefault((one.pipeline, fixed), {})
            group[value] = max(group.get(value, one), one, key=lambda each: len(each.rows))
    best = max(groups.values(), key=_rank, default={})
    if len(best) < 2:
        raise NoFigure(f"it needs bita with {what}, everything else being equal, and {BASELINE} on the same pipeline")
    points = {value: best[value] for value in sorted(best, key=order)}
    return _over_equal_prompts(points, bases[points[next(iter(points))].pipeline])


def _rank(group: dict[Value, Series]) -> tuple[object, ...]:
    """Ranks ablations: most points; of equals by the BiTA and trees that are preferred, then the paper's pipeline."""
    series = list(group.values())
    preferred = sum(_preference(one.bita, one.tree) for one in series)
    pipeline = series[0].pipeline
    place = not pipeline.recut, pipeline.groups == REFERENCE_GROUPS, pipeline.groups
    return len(series), preferred, *place, sum(len(one.rows) for one in series)


def _over_equal_prompts(points: dict[Value, Series], baseline: Series) -> Compared[Value]:
    cases = baseline.cases.intersection(*(one.cases for one in points.values()))
    if not cases:
        raise NoFigure(
            f"no prompt was answered by {BASELINE} and by every one of the {len(points)} BiTA that differ in one thing"
        )
    return Compared({value: one.only(cases) for value, one in points.items()}, baseline.only(cases))


def _preference(trained: TrainedBita | None, tree: Tree | None) -> int:
    """The higher, the closer to the paper's prompt, then to the tree that ``bita`` takes by itself, then to the paper's."""
    has_papers_prompt = trained is not None and (trained.prompting, trained.prompt_tokens) == PAPER_PROMPT
    is_default = tree is not None and tree.shape == _DEFAULT_SHAPE
    is_papers = tree is not None and (tree.shape, tree.children) == PAPER_TREE
    return 4 * has_papers_prompt + 2 * is_default + is_papers
