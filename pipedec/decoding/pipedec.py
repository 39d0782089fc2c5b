"""PipeDec (paper §3): one layer of the prediction tree enters the pipeline at every timestep.

While the stages compute, the draft model expands the layer that entered last. On a hit, the tree and the draft model's output
are pruned to the subtree of the accepted token, and the next layer is chosen from the remaining candidates. On a miss, the
accepted token becomes the root of a new tree, which enters the draft model and the first stage at the same time. Tokens that a
structure forces enter with the row above them.
"""

from __future__ import annotations

from pipedec.core import NO_MASKS, Accepted, Step
from pipedec.decoding.context import MethodContext
from pipedec.decoding.forced import chain_below, grow, of_leaves, plant, room_of_chain
from pipedec.decoding.lockstep import Drafting
from pipedec.methods import PipeDecOptions, options_of
from pipedec.tree import Candidates, PredictionTree


class PipeDec:
    """Layer-wise dynamic tree: the ``width`` most probable paths per layer, ``children`` candidates per row."""

    masks = NO_MASKS

    def __init__(self, context: MethodContext, number: int) -> None:
        self._limits = options_of(context.request, PipeDecOptions)
        self._drafter = context.drafter_of(number)
        self._grammar = context.grammar
        self.tree = PredictionTree(context.device)
        self._root: int | None = None  # a certain token that has yet to enter
        self.room = max(self._limits.width, 1 + room_of_chain(self._grammar))
        self._layer = slice(0, 0)  # the rows that entered last and have yet to be drafted
        self._candidates: Candidates | None = None  # their children, as drafted

    @property
    def has_entered(self) -> bool:
        return self._root is None

    @property
    def in_flight(self) -> int:
        return self.tree.num_rows

    @property
    def wanted(self) -> int:
        """The root after a miss, else the next layer."""
        if self._root is not None:
            return 1 + len(chain_below(self._grammar))
        if self._candidates is None:
            return 0
        count, width = self._candidates.token_ids.numel(), min(self._limits.width, self.room)
        return min(count, width) if self._grammar is None or not count else width

    def draft(self) -> Drafting:
        rows = range(self._layer.start, self._layer.stop)
        self._layer = slice(0, 0)
        if rows:
            (candidates,) = yield [self._drafter.rows(self.tree, rows, self._limits.children)]
            self._candidates = candidates if self._grammar is None else of_leaves(self.tree, candidates)

    def accept(self, accepted: Accepted) -> None:
        advance = self.tree.advance(accepted.tokens)
        self._drafter.advance(advance.changes)
        if self._candidates is not None:
            self._candidates = self._candidates.advanced(advance)
        self._layer = slice(0, 0)
        self._root = None if advance.hit else accepted.tokens[-1]

    def cut(self) -> None:
        self._drafter.advance(self.tree.clear().changes)
        self._layer, self._candidates, self._root = slice(0, 0), None, None

    def plant(self, token: int) -> None:
        self._root = token

    def propose(self) -> Step | None:
        """The root after a miss, else the next layer; None if no candidates are left, because the width limit cut them off."""
        candidates, self._candidates = self._candidates, None
        if self._root is not None:
            self._layer = plant(self.tree, self._root, self._grammar)
            self._root = None
        elif candidates is not None and candidates.token_ids.numel():
            self._layer = grow(self.tree, candidates, min(self._limits.width, self.room), self._grammar)
        else:
            return None
        if self._layer.start == self._layer.stop:
            return None
        token_ids, parents = self.tree.ids_of(self._layer)
        return Step(token_ids, parents, log_probs=self.tree.log_probs[self._layer])
