"""Trees of the candidates that BiTA's masks predict: which candidates enter, and below which rows masks follow.

Three shapes are the paper's (BiTA §3.2, Table 4). ``likeliest`` is our own: within a number of rows, it picks the candidates and
masks of greatest expected value, learned from the ranks of tokens accepted so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipedec.core import MaskParams

Forecast = Sequence[Sequence[int]]  # for each position after the last accepted token, the predicted tokens, best first
_PRIOR_TRIALS = 8.0
_PRIOR_CHANCE = 0.25  # of the best token; the chances of the others fall with a power of their rank
_PRIOR_POWER = 1.2
_MASKS = -1  # stands for a group of masks, instead of the rank of a candidate
_VALUE_OF_MASKS = 0.4  # accepted tokens that new masks add to the next pass, compared with what is left of older masks


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


def straightforward(root: int, forecast: Forecast) -> CandidateTree:
    """A chain of the best tokens, with masks below the root alone (BiTA Figure 4)."""
    tree = CandidateTree([root], with_masks=[0])
    for row, predicted in enumerate(forecast):
        tree.add(predicted[0], row)
    return tree


def efficient(root: int, forecast: Forecast) -> CandidateTree:
    """A tree in which only the best token of a position has children, with masks below every row (BiTA Figure 5)."""
    return _layered(root, forecast, with_children=1)


def full(root: int, forecast: Forecast) -> CandidateTree:
    """A tree in which every token of a position has children, with masks below every row."""
    return _layered(root, forecast, with_children=None)


def likeliest(root: int, forecast: Forecast, chances: RankChances, rows: int, masks: int) -> CandidateTree:
    """The tree of greatest expected value within a number of rows.

    The value of a candidate is the chance that it is accepted: the product of the chances along its path. A group of masks
    has value if the accepted path ends at its row, because it then forecasts the next candidates instead of older masks.

    Args:
        rows: maximum rows, masks included; the root and its masks are always there.
        masks: number of masks in a group.
    """
    tree = CandidateTree([root], with_masks=[0])
    layers = [
        sorted(zip(of_position, predicted, strict=False), reverse=True)
        for of_position, predicted in zip(chances.of(forecast), forecast, strict=True)
    ]  # for each depth, (chance, token) of the candidates, best first
    ends = [1 - sum(chance for chance, _ in layer) for layer in layers] + [1.0]  # chance that a path ends at each depth
    heap: list[tuple[float, int, int, int]] = []  # negative value per row, parent row, rank of the candidate or _MASKS, rows
    path_chances, depths = [1.0], [0]

    def offer(row: int, rank: int) -> None:
        depth = depths[row]
        if rank == _MASKS:
            heapq.heappush(heap, (-path_chances[row] * ends[depth] * _VALUE_OF_MASKS / masks, row, rank, masks))
        elif depth < len(layers) and rank < len(layers[depth]):
            heapq.heappush(heap, (-path_chances[row] * layers[depth][rank][0], row, rank, 1))

    remaining = rows - 1 - masks
    offer(0, 0)
    while heap:
        value, row, rank, cost = heapq.heappop(heap)
        if cost > remaining:
            continue
        remaining -= cost
        if rank == _MASKS:
            tree.with_masks.append(row)
            continue
        offer(row, rank + 1)
        new = tree.add(layers[depths[row]][rank][1], row)
        depths.append(depths[row] + 1)
        path_chances.append(-value)
        offer(new, 0)
        offer(new, _MASKS)
    return tree


def _layered(root: int, forecast: Forecast, with_children: int | None) -> CandidateTree:
    """A layer for each position; the first ``with_children`` rows of a layer have children (None: all)."""
    tree, layer = CandidateTree([root]), [0]
    for predicted in forecast:
        layer = [tree.add(token, parent) for parent in layer[:with_children] for token in predicted]
    tree.with_masks = list(range(len(tree.token_ids)))
    return tree
