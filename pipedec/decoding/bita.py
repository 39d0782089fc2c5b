"""BiTA (``bita``): the target drafts for itself, with mask rows and a learned prompt. No draft model is needed.

A step is a tree: the last accepted token, candidates for the tokens after it, and groups of masks below some of these rows. One
pass through all stages verifies the candidates and forecasts the next ones (BiTA §3.2, Algorithm 1): the verdict contains the
accepted tokens and the masks' predictions for the positions after them. Only accepted rows outlive a verdict, so the method has
no prediction tree, and runs no model.

Three shapes of trees are the paper's (BiTA §3.2, Table 4). ``likeliest`` is our own: the candidates and masks of greatest
expected value, by what verdicts so far have taught of the masks' probabilities. With a Markov table the candidates below a row
depend on its token. With a structure, every shape begins below the forced tokens after the root, and has only candidates that the
structure allows; a forced token replaces them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import torch

from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import MaskParams, Step
from pipedec.core.verdict import Accepted
from pipedec.decoding.budget import Demand
from pipedec.decoding.forced import chain_below
from pipedec.decoding.mask_forecast import Confidence, MaskForecast
from pipedec.decoding.method import Method, Resources
from pipedec.grammar import Grammar
from pipedec.methods import MAX_ROWS, BitaOptions, options_of
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import mask_groups

_MASKS = -1  # replaces the rank of a candidate: a group of masks
_VALUE_OF_MASKS = 0.4  # accepted tokens that new masks add to the next pass, compared with the rest of the older forecast


@dataclass
class CandidateTree:
    """The last accepted token (row 0) and the candidates below it, a parent before its children."""

    token_ids: list[int]  # token of each row
    parents: list[int] = field(default_factory=lambda: [-1])  # parent of each row, −1 for the root
    with_masks: list[int] = field(default_factory=list)  # rows that have a group of masks

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
        rows, row = list(zip(self.token_ids, self.parents, strict=False)), 0
        for token in path:
            if (token, row) not in rows:
                return False
            row = rows.index((token, row))
        return True


def _layered(
    forecast: MaskForecast, grammar: Grammar | None = None, *, with_children: int | None, width: int | None = None
) -> CandidateTree:
    """One layer per position, with masks below every row. The first ``with_children`` rows of a layer have children: the best
    ``width`` predictions. None: all.
    """
    tree, last = _planted(forecast.root, grammar)
    layer = [last]
    for _ in forecast.tokens[last:]:
        parents = layer[:with_children]
        paths = [tree.path(parent) for parent in parents]
        lines = [_possible(path, forecast.after(path)[0], repeat(0.0), grammar)[:width] for path in paths]
        layer = [tree.add(token, parent) for parent, line in zip(parents, lines, strict=True) for _, token in line]
    tree.with_masks = list(range(last, len(tree.token_ids)))
    return tree


def straightforward(forecast: MaskForecast, grammar: Grammar | None = None) -> CandidateTree:
    """A chain of the best tokens, with masks below the root alone (BiTA Figure 4)."""
    tree = _layered(forecast, grammar, with_children=1, width=1)
    del tree.with_masks[1:]
    return tree


efficient = partial(_layered, with_children=1)  # only the best token of a position has children (BiTA Figure 5)
full = partial(_layered, with_children=None)  # every token of a position has children
Shape = Callable[[MaskForecast, Grammar | None], CandidateTree]
SHAPES: dict[str, Shape] = {"straightforward": straightforward, "efficient": efficient, "full": full}


def likeliest(
    forecast: MaskForecast, confidence: Confidence, rows: int, masks: int, grammar: Grammar | None = None
) -> CandidateTree:
    """The tree of greatest expected value within ``rows`` rows, masks included. The root and its masks are always in it; forced
    tokens after the root are not counted.

    The value of a candidate is the chance that it is accepted: the product of the chances along its path. A group of ``masks``
    masks has value if the accepted path ends at its row: then it forecasts the next candidates, instead of what is left of the
    older forecast.
    """
    tree, last = _planted(forecast.root, grammar)
    tree.with_masks = [last]
    heap: list[tuple[float, int, int, int]] = []  # negative value per row, parent row, rank of the candidate or _MASKS, rows
    path_chances = {last: 1.0}
    below: dict[int, list[tuple[float, int]]] = {}  # by row, (chance, token) of the candidates below it, best first

    def begin(row: int) -> None:
        path = tree.path(row)
        predicted, probabilities = forecast.after(path)
        chances = confidence.of(forecast.first + len(path), probabilities) if predicted else ()
        below[row] = sorted(_possible(path, predicted, chances, grammar), reverse=True) if predicted else []
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


def _planted(root: int, grammar: Grammar | None) -> tuple[CandidateTree, int]:
    """A tree of the root and its forced tokens, and the last of these rows."""
    token_ids = [root, *chain_below(grammar)]
    last = len(token_ids) - 1
    return CandidateTree(token_ids, list(range(-1, last))), last


def _possible(
    path: Sequence[int], predicted: Sequence[int], chances: Iterable[float], grammar: Grammar | None
) -> list[tuple[float, int]]:
    """The tokens that may follow ``path``, each with its chance: a forced one, or the allowed ones of those predicted."""
    if grammar is None:
        return list(zip(chances, predicted, strict=False))
    if forced := grammar.forced(path, 1):
        return [(1.0, forced[0])]
    allowed = grammar.allowed(path)
    return [(chance, token) for chance, token in zip(chances, predicted, strict=False) if token in allowed]


DEFAULT_NAMED = {"likeliest": 16, "efficient": 5, "full": 2}  # tokens that each mask predicts; efficient: BiTA §4.1
DEFAULT_FORECAST = 64  # maximum tokens that all masks predict together, unless the request sets those of each mask


def mask_params(limits: BitaOptions, trained_masks: int) -> MaskParams:
    """The masks of a group, and how many tokens each names. Raises UserError for more masks than were trained."""
    depth = limits.depth or trained_masks
    if depth > trained_masks:
        raise UserError(f"depth {depth}, but this BiTA was trained with {trained_masks} masks: lower --depth")
    if limits.shape == "straightforward":
        return MaskParams(depth, 1)
    return MaskParams(depth, limits.children or min(DEFAULT_NAMED[limits.shape], DEFAULT_FORECAST // depth))


class Bita(Method):
    """One tree per passage through the pipeline. Raises UserError if it is too large, or deeper than the trained masks."""

    in_flight = 0

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        super().__init__(request, sequence, resources, thread)
        limits = options_of(request, BitaOptions)
        self.masks = mask_params(limits, resources.trained_masks)
        depth, named = self.masks.count, self.masks.named
        shapes = {  # rows of the largest tree, masks included: at least the root and a group of masks
            "straightforward": 1 + 2 * depth,
            "efficient": (1 + depth) * (1 + depth * named),
            "full": (1 + depth) * sum(named**layer for layer in range(depth + 1)),
        }
        rows = shapes.get(limits.shape, max(limits.rows, 1 + depth))
        if max(rows, depth * named) > MAX_ROWS:
            excess = f"a tree of {rows} rows" if rows > MAX_ROWS else f"a forecast of {depth * named} tokens"
            raise UserError(f"{excess} is more than {MAX_ROWS}: lower --depth or --children")
        self.whole = rows + self.max_forced
        self._room = self.whole  # rows of the next step: less if threads share it
        self._shape = limits.shape
        self._rows = limits.rows
        self._confidence = resources.experience.learned(request, Confidence, self.masks)
        self._forecast: MaskForecast | None = None  # after the root; None before the first verdict
        self._entered = CandidateTree([])  # of the last step

    def demand(self) -> Demand:
        """As many rows as the largest tree has, or as the last step had room for."""
        return Demand(whole=0 if self.root is None else min(self._room, self.whole))

    def propose(self, room: int) -> Step | None:
        """The root, then the candidates, then the masks."""
        self._room = room
        if self.root is None:
            return None
        assert self._forecast is not None
        tree = self._entered = self._candidates(self._forecast)
        self.root = None
        tokens, parents, with_masks = (
            torch.tensor(rows, dtype=torch.int64) for rows in (tree.token_ids, tree.parents, tree.with_masks)
        )
        masks, mask_parents = mask_groups(with_masks, len(tokens), self.masks.count)
        self.in_flight = len(tokens) + len(masks)
        return Step(torch.cat((tokens, masks)), torch.cat((parents, mask_parents)))

    def accept(self, accepted: Accepted) -> None:
        if self._forecast is not None:
            self._confidence.observe(self._forecast, accepted.tokens)
        has_entered = self._entered.contains(accepted.tokens)  # only if the last token ends the thread: else another would follow
        self.root, self._forecast = None if has_entered else accepted.tokens[-1], self._forecast_of(accepted)
        self.in_flight = 0

    def cut(self) -> None:
        self.root, self._forecast, self.in_flight = None, None, 0

    def plant(self, token: int) -> None:
        super().plant(token)
        self._forecast = MaskForecast(token)

    def _forecast_of(self, accepted: Accepted) -> MaskForecast:
        sampling = self.request.sampling
        return MaskForecast(
            accepted.tokens[-1], accepted.forecast, accepted.surprisals, self.masks.count - len(accepted.forecast),
            self.resources.markov, 1 / sampling.temperature if sampling.is_stochastic else 1.0,
        )  # fmt: skip

    def _candidates(self, forecast: MaskForecast) -> CandidateTree:
        """The root and its candidates; the root alone if there is no room for masks."""
        if self._room <= self.masks.count:
            return CandidateTree([forecast.root])
        if self._shape in SHAPES:
            tree = SHAPES[self._shape](forecast, self.grammar)
            if len(tree.token_ids) + self.masks.count * len(tree.with_masks) <= self._room:
                return tree
        return likeliest(forecast, self._confidence, min(self._rows, self._room), self.masks.count, self.grammar)
