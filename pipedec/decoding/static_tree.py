"""Static tree pipeline parallelism (``stpp``, PipeDec §4.2, after SpecInfer): a whole tree enters in one step.

After a verdict the draft model works alone for a timestep: layer by layer it grows the tree below the last accepted token, while
the stages are idle. The tree then passes through all stages as one step. Its verdict accepts the path on which target and tree
agree, and one more token, which is the next root. Tokens that a structure forces belong to the layer of the row above them.
"""

from __future__ import annotations

from pipedec.core import NO_MASKS, Accepted, Step
from pipedec.decoding.context import MethodContext
from pipedec.decoding.forced import grow, of_leaves, plant, room_of_chain
from pipedec.decoding.lockstep import Drafting
from pipedec.methods import StaticTreeOptions, options_of
from pipedec.tree import PredictionTree


class StaticTree:
    """``depth`` layers of at most ``width`` rows; if ``rows`` is given, the ``rows`` most probable rows of all layers.

    Neither counts what is forced behind the root.
    """

    masks = NO_MASKS

    def __init__(self, context: MethodContext, number: int) -> None:
        self._limits = options_of(context.request, StaticTreeOptions)
        self._drafter = context.drafter_of(number)
        self._grammar = context.grammar
        self.tree = PredictionTree(context.device)
        self.room = 1 + (self._limits.rows or self._limits.depth * self._limits.width) + room_of_chain(self._grammar)
        self._root: int | None = None  # a certain token whose tree has yet to be drafted
        self._is_drafted = False  # whether there is a drafted tree that has yet to enter

    @property
    def has_entered(self) -> bool:
        return self._root is None and not self._is_drafted

    @property
    def in_flight(self) -> int:
        return 0 if self._is_drafted else self.tree.num_rows

    @property
    def wanted(self) -> int:
        """The tree, once it is drafted."""
        return min(self.tree.num_rows, self.room) if self._is_drafted else 0

    @property
    def _layer_width(self) -> int:
        """The ``rows`` most probable rows of a tree are among the ``rows`` most probable of their layers."""
        if self._limits.rows is not None:
            return min(self._limits.rows, self.room)
        return min(self._limits.width, max(self.room // self._limits.depth, 1))

    def draft(self) -> Drafting:
        """Draft the whole tree below a new root: one forward for every layer but the last."""
        if self._root is None:
            return
        layer, self._root = plant(self.tree, self._root, self._grammar), None
        certain = layer.stop - 1
        for _ in range(self._limits.depth):
            rows = range(layer.start, layer.stop)
            if not rows:
                break
            (candidates,) = yield [self._drafter.rows(self.tree, rows, self._limits.children)]
            candidates = candidates if self._grammar is None else of_leaves(self.tree, candidates)
            if not candidates.token_ids.numel():
                break
            layer = grow(self.tree, candidates, self._layer_width, self._grammar)
        if self._limits.rows is not None:
            self._drafter.advance(self.tree.keep(self.tree.most_probable(certain + self._limits.rows)).changes)
        self._is_drafted = True

    def accept(self, accepted: Accepted) -> None:
        advance = self.tree.advance(accepted.tokens)
        self._drafter.advance(advance.changes)
        self._root = None if advance.hit else accepted.tokens[-1]  # a hit ends the thread: else its successor were accepted, too
        self._is_drafted = False

    def cut(self) -> None:
        self._drafter.advance(self.tree.clear().changes)
        self._root, self._is_drafted = None, False

    def plant(self, token: int) -> None:
        self._root = token

    def propose(self) -> Step | None:
        """The whole tree, or its ``room`` most probable rows."""
        if not self._is_drafted:
            return None
        self._is_drafted = False
        if self.tree.num_rows > self.room:
            self._drafter.advance(self.tree.keep(self.tree.most_probable(self.room - 1)).changes)
        token_ids, parents = self.tree.ids_of(slice(0, self.tree.num_rows))
        return Step(token_ids, parents, log_probs=self.tree.log_probs)
