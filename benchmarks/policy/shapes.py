"""Static trees of other shapes than ``stpp``'s: EAGLE-2 (arXiv 2406.16858), OPT-Tree (2406.17276), Sequoia (2402.12374), EVICT
(2605.00342), and chains as MTP heads draft them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from math import exp
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from benchmarks.policy.replay import WatchedExperience
from pipedec.core.errors import BadValue
from pipedec.core.request import TokenizedRequest
from pipedec.core.verdict import Accepted
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.method import Resources
from pipedec.decoding.static_tree import Pick, StaticTree, ranked
from pipedec.methods import Children, Depth, Option, Rows, StaticTreeOptions, options_of
from pipedec.threads import Sequence as ThreadSequence

Node = tuple["Node", ...]  # the children of a node of a static tree, the likeliest first
MAX_PLANNED_ROWS = 256
_PRIOR_TOKENS = 16  # accepted tokens that the prior of ``PositionalAcceptance`` stands for
_MOVED = 0.02  # change of a probability after which the tree is computed anew


class Eagle2Options(StaticTreeOptions, frozen=True):
    """``eagle2`` (EAGLE-2 §5): its top K are ``children``; ``width`` means nothing."""

    children: Annotated[Children, Option("Children per row, and rows per layer")] = 10
    depth: Annotated[Depth, Option("Tree layers below the root")] = 6
    rows: Annotated[Rows, Option("Maximum tree size")] = 60

    @property
    def layer_rows(self) -> int:
        return self.children


class EvictOptions(Eagle2Options, frozen=True):
    """``evict``: ``rows`` and ``depth`` are those of the tree that is drafted, as EAGLE-2's, and cut."""


class MtpOptions(StaticTreeOptions, frozen=True):
    """``mtp``: a chain of ``depth`` drafted tokens in every round; drafting takes no time (see ``opponents.FREE_DRAFTS``)."""

    width: Annotated[Rows, Option("Rows per layer")] = 1
    children: Annotated[Children, Option("Children per row")] = 1
    depth: Annotated[Depth, Option("Drafted tokens of a round")] = 3


class OptTreeOptions(StaticTreeOptions, frozen=True):
    """``opt-tree`` (OPT-Tree §4); ``width`` means nothing."""

    depth: Annotated[Depth, Option("Tree layers below the root")] = 10
    rows: Annotated[Rows, Option("Maximum tree size")] = 60
    min_gain: Annotated[Annotated[int, Meta(ge=1, le=100)], Option("Percent of a token that one more layer must bring")] = 10


class SequoiaOptions(StaticTreeOptions, frozen=True):
    """``sequoia`` (Sequoia §4); ``width`` means nothing."""

    depth: Annotated[Depth, Option("Tree layers below the root")] = 8
    rows: Annotated[Rows, Option("Maximum tree size")] = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows > MAX_PLANNED_ROWS:
            raise BadValue(f"rows: must be at most {MAX_PLANNED_ROWS} with sequoia, not {self.rows}")


class OptTree(StaticTree):
    """OPT-Tree (§4): of all choices so far, those among the best ``rows``. No layer is drafted after one that raises the expected
    number of accepted tokens, the sum of their chances, by less than ``min_gain``.
    """

    limits: OptTreeOptions

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        super().__init__(request, sequence, resources, thread)
        self._best: list[float] = []  # log-chances of the best choices so far, descending

    def plant(self, token: int) -> None:
        super().plant(token)
        self._best = []

    def picks(self, layer: Sequence[Sequence[float]]) -> list[Pick]:
        new, before = ranked(layer), sum(map(exp, self._best))
        merged = sorted([(-chance, False) for chance in self._best] + [(-chance, True) for chance, _ in new])[: self.limits.rows]
        self._best = [-cost for cost, _ in merged]
        gain = sum(map(exp, self._best)) - before
        return [Pick(parent, gain >= self.limits.min_gain / 100) for _, parent in new[: sum(is_new for _, is_new in merged)]]


class Evict(StaticTree):
    """EVICT (arXiv 2605.00342): a drafted tree is cut to its most cost-effective prefix before it is verified.

    By the paper's abstract, the drafter's signals estimate what rows bring, and their cost was measured beforehand; answers stay
    the same. Assumed here: the signals are the chances of paths, by which rows are ordered, and the prefix is the one with the
    most expected tokens per millisecond of the whole round. The costs are exactly those of the replay.
    """

    def _finish(self) -> None:
        super()._finish()
        experience = self.resources.experience
        assert isinstance(experience, WatchedExperience)
        chances = map(exp, islice(self.tree.entering_chances(), self._size))
        expected = enumerate(accumulate(chances), start=1)  # by rows: each that is accepted yields the token after it
        paces = {rows: tokens / experience.round_ms(rows, self._drafted_layers) for rows, tokens in expected}
        self._size = max(range(self.tree.num_certain, self._size + 1), key=paces.__getitem__)


class PositionalAcceptance:
    """The probability that the k-th best choice below an accepted row is accepted, for the first ``children`` of them, and the
    best tree for these probabilities (Sequoia §3.1, §4.1). Learned online.
    """

    def __init__(self, rows: int, depth: int, children: int) -> None:
        self._rows, self._depth = rows, depth
        self._counts: NDArray[np.float64] = _PRIOR_TOKENS * 0.5 * np.power(0.4, np.arange(children, dtype=np.float64))
        self._total = float(_PRIOR_TOKENS)
        self._planned: NDArray[np.float64] | None = None  # the probabilities for which the tree was computed
        self._tree: Node = ()

    def observe(self, rank: int) -> None:
        """Learn the rank of an accepted token."""
        self._total += 1
        if rank < len(self._counts):
            self._counts[rank] += 1

    @property
    def tree(self) -> Node:
        """The best tree; computed anew when a probability has changed enough."""
        chances: NDArray[np.float64] = np.divide(self._counts, self._total)
        if self._planned is None or np.abs(chances - self._planned).max() > _MOVED:
            self._planned, self._tree = chances, best_tree(chances, self._rows, self._depth)
        return self._tree


class Sequoia(StaticTree):
    """Sequoia: a tree that depends on ranks alone, the best one for what was learned; all of it enters."""

    tree: _RankedTree

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        super().__init__(request, sequence, resources, thread)
        options = options_of(request, SequoiaOptions)
        self.keeps_best = False
        self.tree = _RankedTree(None if self.grammar is None else self._chain_below)
        sizes = options.rows, options.depth, options.children
        self._acceptance = resources.experience.learned(request, PositionalAcceptance, *sizes)
        self._nodes: list[Node] = []  # of the last layer

    def plant(self, token: int) -> None:
        super().plant(token)
        self._nodes = [self._acceptance.tree]

    def picks(self, layer: Sequence[Sequence[float]]) -> list[Pick]:
        taken = [
            (parent, child)
            for parent, (node, choices) in enumerate(zip(self._nodes, layer, strict=False))
            for child, _ in zip(node, choices, strict=False)
        ]
        self._nodes = [child for _, child in taken]
        return [Pick(parent, bool(child)) for parent, child in taken]

    def accept(self, accepted: Accepted) -> None:
        for rank in self.tree.ranks(accepted.tokens):
            self._acceptance.observe(rank)
        super().accept(accepted)


class _RankedTree(InjectionTree):
    def ranks(self, tokens: Sequence[int]) -> list[int]:
        """For accepted ``tokens`` that follow drafted rows, one after another: the place of each among the choices below its row,
        best first; if it is none of them, their number.
        """
        found, row = list[int](), self._rows[0] if self._rows else None
        for token in tokens:
            if row is None:
                break
            if row.is_drafted and row.forced is None and row.line is not None:
                choices = row.line.token_ids
                found.append(choices.index(token) if token in choices else len(choices))
            row = row.children.get(token)
        return found


def best_tree(chances: Sequence[float] | NDArray[np.float64], rows: int, depth: int) -> Node:
    """The tree of at most ``rows`` nodes below its root, within ``depth`` layers, with the greatest expected number of accepted
    nodes, where ``chances[k]`` is the probability that the k-th child of an accepted node is accepted (Sequoia §4.1).

    Dynamic programme over depth, children and nodes, in O(depth · children · rows²).
    """
    table: list[NDArray[np.int64]] = []  # by depth [B, rows + 1]: the nodes that the last of b + 1 children has, itself included
    counts: list[NDArray[np.int64]] = []  # by depth [rows + 1]: the best number of children
    below = np.zeros(rows + 1)  # expected accepted nodes below a node, by the nodes there are for them
    left = np.arange(rows + 1)[:, None] - np.arange(1, rows + 1)  # [rows + 1, rows], nodes for the children before the last
    for _ in range(depth):
        value = np.zeros(rows + 1)  # with no child
        values, nodes = [value], []
        for chance in chances:
            found = np.where(left >= 0, value[left], -np.inf) + chance * (1 + below[:rows])
            nodes.append(found.argmax(1) + 1)
            value = found.max(1)
            values.append(value)
        table.append(np.array(nodes))
        counts.append(np.array(values).argmax(0))
        below = np.array(values).max(0)

    def node(layers: int, room: int) -> Node:
        if not layers:
            return ()
        children: list[Node] = []
        for child in range(counts[layers - 1][room] - 1, -1, -1):
            taken = int(table[layers - 1][child, room])
            children.append(node(layers - 1, taken - 1))
            room -= taken
        return tuple(children[::-1])

    return node(depth, rows)
