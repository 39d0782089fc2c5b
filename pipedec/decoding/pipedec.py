"""PipeDec (paper §3): one layer of the prediction tree enters the pipeline at every timestep.

While the stages compute, the draft model expands the layer that entered last. On a hit, the tree and the draft model's output
are pruned to the subtree of the accepted token, and the next layer is chosen from the remaining candidates. On a miss, the
accepted token becomes the root of a new tree, which enters the draft model and the first stage at the same time (paper §3.3.2 to
§3.3.4). Tokens that a structure forces enter with the row above them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import Step
from pipedec.core.verdict import Accepted
from pipedec.decoding.budget import Demand
from pipedec.decoding.forced import chain_below, grow, of_leaves, plant
from pipedec.decoding.method import DraftRoom, Method, Resources
from pipedec.methods import PipeDecOptions, options_of
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, PredictionTree


class PipeDec(Method):
    """Layer-wise dynamic tree: the ``width`` most probable paths per layer, ``children`` candidates per row."""

    tree: PredictionTree
    fills = True

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        super().__init__(request, sequence, resources, thread)
        limits = options_of(request, PipeDecOptions)
        self.tree = PredictionTree(resources.device)
        self.children = limits.children
        self.whole = max(limits.width, 1 + self.max_forced)
        self._width = limits.width  # of the next layer: less if threads share a step
        self._max_width = limits.width
        self._layer = range(0)  # the rows that entered last and have yet to be drafted
        self._candidates: Candidates | None = None  # their children, as drafted

    @property
    def in_flight(self) -> int:
        return self.tree.num_rows

    def demand(self) -> Demand:
        """The root after a miss, else the next layer."""
        grammar = self.grammar
        if self.root is not None:
            return Demand(whole=1 + len(chain_below(grammar)))
        if self._candidates is None:
            return Demand()
        count = self._candidates.token_ids.numel()
        return Demand(whole=min(count, self._width) if grammar is None or not count else self._width)

    def propose(self, room: int) -> Step | None:
        """The root after a miss, else the next layer; None if no candidates are left: the width limit cut off their rows."""
        self._width = min(self._max_width, room)
        candidates, self._candidates = self._candidates, None
        if self.root is not None:
            rows = plant(self.tree, self.root, self.grammar)
            self.root = None
        elif candidates is not None and candidates.token_ids.numel():
            rows = grow(self.tree, candidates, self._width, self.grammar)
        else:
            return None
        self._layer = range(rows.start, rows.stop)
        if not self._layer:
            return None
        token_ids, parents = self.tree.ids_of(rows)
        return Step(token_ids, parents, log_probs=self.tree.log_probs[rows])

    def draft(self, room: DraftRoom) -> Sequence[int]:
        layer, self._layer = self._layer, range(0)
        return layer

    def drafted(self, rows: Sequence[int], candidates: Candidates | None) -> None:
        assert candidates is not None
        self._candidates = candidates if self.grammar is None else of_leaves(self.tree, candidates)

    def accept(self, accepted: Accepted) -> None:
        advance = self.tree.advance_to(accepted.tokens)
        self._follow(advance.changes)
        if self._candidates is not None:
            self._candidates = self._candidates.advanced(advance)
        self._layer = range(0)
        self.root = None if advance.hit else accepted.tokens[-1]

    def cut(self) -> None:
        self._follow(self.tree.clear().changes)
        self._layer, self._candidates, self.root = range(0), None, None
