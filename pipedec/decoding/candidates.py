"""Trees of candidates that BiTA's masks have named: which of them enter, and behind which rows masks follow.

Three shapes are the paper's (BiTA §3.2, Table 4). ``likeliest`` is ours: it spends a number of rows on those candidates and masks
that are worth most by what verdicts have taught about the ranks of right tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipedec.core import MaskParams

Forecast = Sequence[Sequence[int]]  # for each place, the nearest first, the likeliest tokens, the best first
_PRIOR_TRIALS = 8.0
_PRIOR_CHANCE = 0.25  # of the best token; the others' falls like a power of their rank
_PRIOR_POWER = 1.2
_MASKS = -1
_WORTH_OF_MASKS = 0.4  # tokens that fresh masks add to the next pass, over those left of older ones


@dataclass
class CandidateTree:
    """The last accepted token (row 0) and the candidates below it, a parent before its children.

    Attributes:
        with_masks: rows that a group of masks stands behind.
    """

    token_ids: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    with_masks: list[int] = field(default_factory=list)

    def add(self, token: int, parent: int) -> int:
        """Returns the new row."""
        self.token_ids.append(token)
        self.parents.append(parent)
        return len(self.token_ids) - 1


class RankChances:
    """How often the token at a place was the r-th that the m-th mask had named, after all before it had been named, too."""

    def __init__(self, masks: MaskParams) -> None:
        self._masks = masks.count
        self._trials = [_PRIOR_TRIALS] * masks.count
        prior = [_PRIOR_CHANCE * _PRIOR_TRIALS / (rank + 1) ** _PRIOR_POWER for rank in range(masks.named)]
        self._hits = [prior[:] for _ in range(masks.count)]

    def observe(self, forecast: Forecast, tokens: Sequence[int]) -> None:
        """``tokens`` came after the one that ``forecast`` came with."""
        for mask, (named, token) in enumerate(zip(forecast, tokens, strict=False), start=self._masks - len(forecast)):
            self._trials[mask] += 1
            if token in named:
                self._hits[mask][named.index(token)] += 1

    def of(self, forecast: Forecast) -> list[list[float]]:
        """For each place of ``forecast``, the chance of each of its tokens. A short forecast is the rest of a group's."""
        first = self._masks - len(forecast)
        return [[hits / trials for hits in self._hits[mask]] for mask, trials in enumerate(self._trials[first:], start=first)]


def straightforward(root: int, forecast: Forecast) -> CandidateTree:
    """A chain of the best tokens, masks behind the root alone (BiTA Figure 4)."""
    tree = CandidateTree([root], with_masks=[0])
    for row, named in enumerate(forecast):
        tree.add(named[0], row)
    return tree


def efficient(root: int, forecast: Forecast) -> CandidateTree:
    """Only the best token of a place has children; masks behind every row (BiTA Figure 5)."""
    return _layered(root, forecast, with_children=1)


def full(root: int, forecast: Forecast) -> CandidateTree:
    """Every token of a place has children; masks behind every row."""
    return _layered(root, forecast, with_children=None)


def likeliest(root: int, forecast: Forecast, chances: RankChances, rows: int, masks: int) -> CandidateTree:
    """At most ``rows`` rows, but at least the root with its ``masks`` masks, by what each row is worth.

    A candidate is worth its chance: the product of the chances along its path. A group of masks is worth something if the
    accepted path ends at the row before it: then the next candidates come from it, and not from older masks.
    """
    tree = CandidateTree([root], with_masks=[0])
    places = [
        sorted(zip(of_place, named, strict=False), reverse=True)
        for of_place, named in zip(chances.of(forecast), forecast, strict=True)
    ]
    ends = [1 - sum(chance for chance, _ in place) for place in places] + [1.0]  # chance that a path ends before each place
    heap: list[tuple[float, int, int, int]] = []  # worth (negative), row, which of the tokens that may follow it, cost in rows
    path_chances, depths = [1.0], [0]

    def offer(row: int, which: int) -> None:
        depth = depths[row]
        if which == _MASKS:
            heapq.heappush(heap, (-path_chances[row] * ends[depth] * _WORTH_OF_MASKS / masks, row, which, masks))
        elif depth < len(places) and which < len(places[depth]):
            heapq.heappush(heap, (-path_chances[row] * places[depth][which][0], row, which, 1))

    left = rows - 1 - masks
    offer(0, 0)
    while heap:
        worth, row, which, cost = heapq.heappop(heap)
        if cost > left:
            continue
        left -= cost
        if which == _MASKS:
            tree.with_masks.append(row)
            continue
        offer(row, which + 1)
        new = tree.add(places[depths[row]][which][1], row)
        depths.append(depths[row] + 1)
        path_chances.append(-worth)
        offer(new, 0)
        offer(new, _MASKS)
    return tree


def _layered(root: int, forecast: Forecast, with_children: int | None) -> CandidateTree:
    """Layer by layer; the first ``with_children`` rows of a layer have children, or all."""
    tree, layer = CandidateTree([root]), [0]
    for named in forecast:
        layer = [tree.add(token, parent) for parent in layer[:with_children] for token in named]
    tree.with_masks = list(range(len(tree.token_ids)))
    return tree
