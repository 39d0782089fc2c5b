"""Static tree pipeline parallelism (``stpp``, PipeDec §4.2, after SpecInfer): a whole tree enters in one step.

After a verdict the draft model works alone for one timestep: it grows the tree below the last accepted token layer by layer,
while the stages are idle. The tree then passes through all stages as one step. Its verdict accepts the path on which target and
tree agree, and one more token, which is the next root. Tokens that a structure forces belong to the layer of the row above them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipedec.core import Accepted, Step
from pipedec.decoding.budget import Demand
from pipedec.decoding.forced import grow, of_leaves, plant
from pipedec.decoding.method import Method, MethodContext
from pipedec.methods import StaticTreeOptions, options_of
from pipedec.tree import Candidates, PredictionTree


class StaticTree(Method):
    """``depth`` layers of at most ``width`` rows, or their ``rows`` most probable ones, besides forced rows after the root."""

    tree: PredictionTree

    def __init__(self, context: MethodContext, thread: int) -> None:
        super().__init__(context, thread)
        self._limits = options_of(context.request, StaticTreeOptions)
        self.tree = PredictionTree(context.device)
        self.children = self._limits.children
        self.whole = 1 + (self._limits.rows or self._limits.depth * self._limits.width) + self.max_forced
        self._room = self.whole  # rows of the next step: less if threads share it
        self._is_drafted = False  # whether there is a drafted tree that has yet to enter
        self._certain = 0  # forced rows after the root
        self._depth = 0  # drafted layers below the root
        self._layer: range | None = None  # the last layer of a tree that is being drafted

    @property
    def in_flight(self) -> int:
        return 0 if self._is_drafted else self.tree.num_rows

    def demand(self) -> Demand:
        """The tree, once it is drafted."""
        return Demand(whole=min(self.tree.num_rows, self._room) if self._is_drafted else 0)

    def propose(self, room: int) -> Step | None:
        """The whole tree, or its ``room`` most probable rows."""
        self._room = room
        if not self._is_drafted:
            return None
        self.root, self._is_drafted = None, False
        if self.tree.num_rows > room:
            self._follow(self.tree.keep(self.tree.most_probable(room - 1)).changes)
        token_ids, parents = self.tree.ids_of(slice(0, self.tree.num_rows))
        return Step(token_ids, parents, log_probs=self.tree.log_probs)

    def draft(self, room: int) -> Sequence[int]:
        """Draft the whole tree below a new root: one forward for every layer but the last."""
        if self.root is not None and self._layer is None and not self._is_drafted:
            rows = plant(self.tree, self.root, self.context.grammar)
            self._layer, self._certain, self._depth = range(rows.start, rows.stop), rows.stop - 1, 0
        if self._layer is None:
            return ()
        if self._layer and self._depth < self._limits.depth:
            return self._layer
        if self._limits.rows is not None:
            self._follow(self.tree.keep(self.tree.most_probable(self._certain + self._limits.rows)).changes)
        self._layer, self._is_drafted = None, True
        return ()

    def drafted(self, rows: Sequence[int], candidates: Candidates | None) -> None:
        """Add the next layer: ``rows`` rows, if given, because the tree's ``rows`` most probable ones may all be in one layer."""
        assert candidates is not None
        if self.context.grammar is not None:
            candidates = of_leaves(self.tree, candidates)
        self._depth += 1
        self._layer = range(0)
        if candidates.token_ids.numel():
            width = self._limits.rows or min(self._limits.width, max(self._room // self._limits.depth, 1))
            layer = grow(self.tree, candidates, min(width, self._room), self.context.grammar)
            self._layer = range(layer.start, layer.stop)

    def accept(self, accepted: Accepted) -> None:
        advance = self.tree.advance(accepted.tokens)
        self._follow(advance.changes)
        self.root = None if advance.hit else accepted.tokens[-1]  # a hit ends the thread: else another token would follow it
        self._is_drafted = False

    def cut(self) -> None:
        self._follow(self.tree.clear().changes)
        self.root, self._is_drafted = None, False
