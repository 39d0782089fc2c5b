"""Trees of the candidates that BiTA's masks predict: which candidates enter, and below which rows masks follow.

Three shapes are the paper's (BiTA §3.2, Table 4). ``likeliest`` is our own: within a number of rows, it picks the candidates and
masks of greatest expected value, learned from the ranks of tokens accepted so far.

With a structure, every shape begins below the forced tokens after the root, and only predicted tokens that it allows enter; where
it forces a token, that one enters instead.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from pipedec.core import MaskParams
from pipedec.decoding.forced import chain_below
from pipedec.grammar import Grammar

Forecast = Sequence[Sequence[int]]  # for each position after the last accepted token, the predicted tokens, best first
_PRIOR_TRIALS = 8.0
_PRIOR_CHANCE = 0.25  # of the best token; the chances of the others fall with a power of their rank
_PRIOR_POWER = 1.2
_MASKS = -1  # stands for a group of masks, instead of the rank of a candidate
_VALUE_OF_MASKS = 0.4  # accepted tokens that new masks add to the next pass, compared with the remaining older masks


@dataclass
class CandidateTree:
    """The last accepted token (row 0) and the candidates below it, a parent before its children.

    Attributes:
        token_ids: token of each row.
        parents: parent of each row, −1 for the root.
        with_masks: rows that have a group of masks.
    """

    token_ids: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    with_masks: list[int] = field(default_factory=list)

    def path(self, row: int) -> list[int]:
        """The tokens on the path from below the root to ``row``, inclusive."""
        path = []
        while row > 0:
            path.append(self.token_ids[row])
            row = self.parents[row]
        return path[::-1]

    def add(self, token: int, parent: int) -> int:
        """Add a candidate; returns its row."""
        self.token_ids.append(token)
        self.parents.append(parent)
        return len(self.token_ids) - 1

    def contains(self, path: Sequence[int]) -> bool:
        """Whether the tree has rows for all tokens of ``path``, which begins below the root."""
        row: int | None = 0
        for token in path:
            pairs = enumerate(zip(self.token_ids, self.parents, strict=False))
            row = next((child for child, pair in pairs if pair == (token, row)), None)
            if row is None:
                return False
        return True


class RankChances:
    """For each mask and rank r, how often the accepted token was the mask's r-th prediction, given that all before it hit."""

    def __init__(self, masks: MaskParams) -> None:
        self._masks = masks.count
        self._trials = [_PRIOR_TRIALS] * masks.count
        prior = [_PRIOR_CHANCE * _PRIOR_TRIALS / (rank + 1) ** _PRIOR_POWER for rank in range(masks.named)]
        self._hits = [prior[:] for _ in range(masks.count)]

    def observe(self, forecast: Forecast, tokens: Sequence[int]) -> None:
        """Learn that ``tokens`` were accepted at the positions of ``forecast``."""
        for mask, (predicted, token) in enumerate(zip(forecast, tokens, strict=False), start=self._masks - len(forecast)):
            self._trials[mask] += 1
            if token in predicted:
                self._hits[mask][predicted.index(token)] += 1

    def of(self, forecast: Forecast) -> list[list[float]]:
        """For each position of ``forecast``, the chance of each predicted token. A short forecast is of a group's last masks."""
        first = self._masks - len(forecast)
        return [[hits / trials for hits in self._hits[mask]] for mask, trials in enumerate(self._trials[first:], start=first)]


def straightforward(root: int, forecast: Forecast, grammar: Grammar | None = None) -> CandidateTree:
    """A chain of the best tokens, with masks below the root alone (BiTA Figure 4)."""
    tree, last = _planted(root, grammar)
    tree.with_masks = [last]
    for predicted in forecast[last:]:
        possible = _possible(tree.path(last), predicted, repeat(0.0), grammar)
        if not possible:
            break
        last = tree.add(possible[0][1], last)
    return tree


def efficient(root: int, forecast: Forecast, grammar: Grammar | None = None) -> CandidateTree:
    """A tree in which only the best token of a position has children, with masks below every row (BiTA Figure 5)."""
    return _layered(root, forecast, grammar, with_children=1)


def full(root: int, forecast: Forecast, grammar: Grammar | None = None) -> CandidateTree:
    """A tree in which every token of a position has children, with masks below every row."""
    return _layered(root, forecast, grammar, with_children=None)


def likeliest(
    root: int, forecast: Forecast, chances: RankChances, rows: int, masks: int, grammar: Grammar | None = None
) -> CandidateTree:
    """The tree of greatest expected value within a number of rows.

    The value of a candidate is the chance that it is accepted: the product of the chances along its path. A group of masks
    has value if the accepted path ends at its row, because it then forecasts the next candidates instead of older masks.

    Args:
        rows: maximum rows, masks included; the root and its masks are always there. Forced tokens after the root are not
            counted.
        masks: number of masks in a group.
    """
    tree, last = _planted(root, grammar)
    tree.with_masks = [last]
    heap: list[tuple[float, int, int, int]] = []  # negative value per row, parent row, rank of the candidate or _MASKS, rows
    path_chances = {last: 1.0}
    below: dict[int, list[tuple[float, int]]] = {}  # by row, (chance, token) of the candidates below it, best first
    of_positions = chances.of(forecast)

    def begin(row: int) -> None:
        path = tree.path(row)
        place = slice(len(path), len(path) + 1)
        lines = zip(forecast[place], of_positions[place], strict=True)
        below[row] = [one for line in lines for one in sorted(_possible(path, *line, grammar), reverse=True)]
        offer(row, 0)

    def offer(row: int, rank: int) -> None:
        if rank == _MASKS:
            ends = 1 - sum(chance for chance, _ in below[row])  # chance that a path ends there
            heapq.heappush(heap, (-path_chances[row] * ends * _VALUE_OF_MASKS / masks, row, rank, masks))
        elif rank < len(below[row]):
            heapq.heappush(heap, (-path_chances[row] * below[row][rank][0], row, rank, 1))

    remaining = rows - 1 - masks
    begin(last)
    while heap:
        value, row, rank, cost = heapq.heappop(heap)
        if cost > remaining:
            continue
        remaining -= cost
        if rank == _MASKS:
            tree.with_masks.append(row)
            continue
        offer(row, rank + 1)
        new = tree.add(below[row][rank][1], row)
        path_chances[new] = -value
        begin(new)
        offer(new, _MASKS)
    return tree


def _layered(root: int, forecast: Forecast, grammar: Grammar | None, with_children: int | None) -> CandidateTree:
    """A layer for each position; the first ``with_children`` rows of a layer have children (None: all)."""
    tree, last = _planted(root, grammar)
    layer = [last]
    for predicted in forecast[last:]:
        parents = layer[:with_children]
        lines = [_possible(tree.path(parent), predicted, repeat(0.0), grammar) for parent in parents]
        layer = [tree.add(token, parent) for parent, line in zip(parents, lines, strict=True) for _, token in line]
    tree.with_masks = list(range(last, len(tree.token_ids)))
    return tree


def _planted(root: int, grammar: Grammar | None) -> tuple[CandidateTree, int]:
    """A tree of the root and its forced tokens, and the last of these rows."""
    token_ids = [root, *chain_below(grammar)]
    last = len(token_ids) - 1
    return CandidateTree(token_ids, list(range(-1, last))), last


def _possible(
    path: Sequence[int], predicted: Sequence[int], chances: Iterable[float], grammar: Grammar | None
) -> list[tuple[float, int]]:
    """The tokens that may follow ``path``, each with its chance: the predicted ones that a structure allows, or a forced one."""
    if grammar is None:
        return list(zip(chances, predicted, strict=False))
    if forced := grammar.forced(path, 1):
        return [(1.0, forced[0])]
    allowed = grammar.allowed(path)
    return [(chance, token) for chance, token in zip(chances, predicted, strict=False) if token in allowed]
