"""BiTA (``bita``): the target drafts for itself, with mask rows and a learned prompt. No draft model is needed.

A step is a tree: the last accepted token, candidates for the tokens after it, and groups of masks below some of these rows. One
pass through all stages verifies the candidates and forecasts the next ones (BiTA §3.2, Algorithm 1): the verdict contains the
accepted tokens and the masks' predictions for the positions after them. Only accepted rows outlive a verdict, so this class keeps
no tree and runs no model.
"""

from __future__ import annotations

import torch

from pipedec.core import Accepted, MaskParams, Step, UserError
from pipedec.decoding.budget import Demand
from pipedec.decoding.candidates import CandidateTree, Forecast, RankChances, efficient, full, likeliest, straightforward
from pipedec.decoding.method import Method, MethodContext
from pipedec.methods import MAX_ROWS, BitaOptions, options_of
from pipedec.tree import mask_groups

DEFAULT_NAMED = {"likeliest": 16, "efficient": 5, "full": 2}  # tokens of each mask; efficient: BiTA §4.1
DEFAULT_FORECAST = 64  # maximum tokens of all masks together, unless the request sets the tokens of each


class Bita(Method):
    """One tree per passage of the pipeline, as the request's options shape it.

    Raises:
        UserError: the target's BiTA has fewer masks than the request's depth, or the tree is too large.
    """

    in_flight = 0

    def __init__(self, context: MethodContext, thread: int) -> None:
        super().__init__(context, thread)
        limits = options_of(context.request, BitaOptions)
        depth = limits.depth or context.trained_masks
        if depth > context.trained_masks:
            raise UserError(f"depth {depth}, but this BiTA was trained with {context.trained_masks} masks: lower --depth")
        is_chain = limits.shape == "straightforward"
        named = 1 if is_chain else limits.children or min(DEFAULT_NAMED[limits.shape], DEFAULT_FORECAST // depth)
        rows = _largest(limits, depth, named)
        if max(rows, depth * named) > MAX_ROWS:
            excess = f"a tree of {rows} rows" if rows > MAX_ROWS else f"a forecast of {depth * named} tokens"
            raise UserError(f"{excess} is more than {MAX_ROWS}: lower --depth or --children")
        self.whole = rows + self.max_forced
        self.masks = MaskParams(depth, named)
        self._room = self.whole  # rows of the next step: less if threads share it
        self._shape = limits.shape
        self._rows = limits.rows
        self._chances = context.experience.learned(context.request, RankChances, self.masks)
        self._forecast: Forecast = ()
        self._entered = CandidateTree([])  # of the last step

    def demand(self) -> Demand:
        """The root and, at most, all rows for which there is room."""
        return Demand(whole=0 if self.root is None else min(self._room, self.whole))

    def propose(self, room: int) -> Step | None:
        """The root, the candidates, then the masks."""
        self._room = room
        if self.root is None:
            return None
        tree = self._entered = self._candidates(self.root)
        self.root = None
        tokens, parents, with_masks = (
            torch.tensor(rows, dtype=torch.int64) for rows in (tree.token_ids, tree.parents, tree.with_masks)
        )
        masks, mask_parents = mask_groups(with_masks, len(tokens), self.masks.count)
        self.in_flight = len(tokens) + len(masks)
        return Step(torch.cat((tokens, masks)), torch.cat((parents, mask_parents)))

    def accept(self, accepted: Accepted) -> None:
        self._chances.observe(self._forecast, accepted.tokens)
        has_entered = self._entered.contains(accepted.tokens)  # then it ends the thread, or its successor would be accepted, too
        self.root, self._forecast = None if has_entered else accepted.tokens[-1], accepted.forecast
        self.in_flight = 0

    def cut(self) -> None:
        self.root, self._forecast, self.in_flight = None, (), 0

    def plant(self, token: int) -> None:
        super().plant(token)
        self._forecast = ()

    def _candidates(self, root: int) -> CandidateTree:
        """The root and its candidates; the root alone if there is no room for masks."""
        if self._room <= self.masks.count:
            return CandidateTree([root])
        shapes = {"efficient": efficient, "straightforward": straightforward, "full": full}
        if self._shape in shapes:
            tree = shapes[self._shape](root, self._forecast, self.context.grammar)
            if len(tree.token_ids) + self.masks.count * len(tree.with_masks) <= self._room:
                return tree
        return likeliest(root, self._forecast, self._chances, min(self._rows, self._room), self.masks.count, self.context.grammar)


def _largest(limits: BitaOptions, depth: int, named: int) -> int:
    """Rows of the largest tree of a shape, masks included: at least the root and a group of masks."""
    shapes = {
        "straightforward": 1 + 2 * depth,
        "efficient": (1 + depth) * (1 + depth * named),
        "full": (1 + depth) * sum(named**layer for layer in range(depth + 1)),
    }
    return shapes.get(limits.shape, max(limits.rows, 1 + depth))
