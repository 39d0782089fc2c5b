"""Shapes of static trees: which choices below the rows of a tree's last layer become the rows of the next one.

Published as EAGLE-2 (arXiv 2406.16858), OPT-Tree (2406.17276) and Sequoia (2402.12374). A choice is named by its chance, that of
its whole path. Knows no tokens and no draft source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Node = tuple["Node", ...]  # the children of a node of a static tree, the likeliest first
_PRIOR_TOKENS = 16  # accepted tokens that the prior of ``PositionalAcceptance`` stands for
_MOVED = 0.02  # change of a probability after which the tree is computed anew


class Pick(NamedTuple):
    """The next choice below a row of the last layer becomes a row; ``is_drafted`` if choices below it are wanted."""

    parent: int
    is_drafted: bool = True


class TreeShape(Protocol):
    """One tree after another, each layer by layer."""

    def begin(self) -> None:
        """Begin a tree: the first layer is its root."""

    def grow(self, layer: Sequence[Sequence[float]]) -> list[Pick]:
        """The rows of the next layer, best first. If not all of them fit, the first ones become rows.

        Args:
            layer: the log-chances of the choices below each row of the last layer, best first. The rows are those of the last
                call, ordered by their parents, or in that order.
        """

    def learn(self, ranks: Sequence[int]) -> None:
        """Learn the ranks of accepted tokens among the choices below the row before them; from 0."""


class WidestLayers:
    """The ``width`` best choices of every layer: the paper's layers (PipeDec §3.3.3), and EAGLE-2's with its top K."""

    def __init__(self, width: int) -> None:
        self._width = width

    def begin(self) -> None:
        """Layers are independent of one another."""

    def grow(self, layer: Sequence[Sequence[float]]) -> list[Pick]:
        return [Pick(parent) for _, parent in _ranked(layer)[: self._width]]

    def learn(self, ranks: Sequence[int]) -> None:
        """Nothing is learned."""


class BestNodes:
    """OPT-Tree (§4): of all choices so far, those among the best ``rows``. No layer is drafted after one that raises the expected
    number of accepted tokens, the sum of their chances, by less than ``min_gain``.
    """

    def __init__(self, rows: int, min_gain: float) -> None:
        self._rows = rows
        self._min_gain = min_gain
        self._best: list[float] = []  # log-chances of the best choices so far, descending

    def begin(self) -> None:
        self._best = []

    def grow(self, layer: Sequence[Sequence[float]]) -> list[Pick]:
        new, before = _ranked(layer), sum(map(exp, self._best))
        merged = sorted([(-chance, False) for chance in self._best] + [(-chance, True) for chance, _ in new])[: self._rows]
        self._best = [-cost for cost, _ in merged]
        gain = sum(map(exp, self._best)) - before
        return [Pick(parent, gain >= self._min_gain) for _, parent in new[: sum(is_new for _, is_new in merged)]]

    def learn(self, ranks: Sequence[int]) -> None:
        """Nothing is learned."""


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


class PositionalTree:
    """Sequoia: a tree that depends on ranks alone, the best one for what ``acceptance`` has learned."""

    def __init__(self, acceptance: PositionalAcceptance) -> None:
        self._acceptance = acceptance
        self._layer: list[Node] = []

    def begin(self) -> None:
        self._layer = [self._acceptance.tree]

    def grow(self, layer: Sequence[Sequence[float]]) -> list[Pick]:
        taken = [
            (parent, child)
            for parent, (node, choices) in enumerate(zip(self._layer, layer, strict=False))
            for child, _ in zip(node, choices, strict=False)
        ]
        self._layer = [child for _, child in taken]
        return [Pick(parent, bool(child)) for parent, child in taken]

    def learn(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._acceptance.observe(rank)


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


def _ranked(layer: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """The choices below all rows of a layer with their parents, best first; of equally good ones, the earlier parent's."""
    return sorted(_choices(layer), key=lambda choice: -choice[0])


def _choices(layer: Sequence[Sequence[float]]) -> Iterator[tuple[float, int]]:
    for parent, chances in enumerate(layer):
        for chance in chances:
            yield chance, parent
