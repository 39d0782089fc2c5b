"""Static tree pipeline parallelism (``stpp``, PipeDec §4.2, after SpecInfer): a whole tree enters in one step.

After a verdict the draft model works alone for one timestep: it grows the tree below the last accepted token layer by layer,
while the stages are idle. The tree then passes through all stages as one step. Its verdict accepts the path on which target and
tree agree, and one more token, which is the next root. Of every layer the most probable rows are kept. Tokens that a structure
forces belong to the layer of the row above them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import Step
from pipedec.core.verdict import Accepted
from pipedec.decoding.budget import Demand
from pipedec.decoding.forced import chain_below
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.method import DraftRoom, Method, Resources
from pipedec.decoding.proposers import Proposals
from pipedec.decoding.sources import fixed_sources
from pipedec.methods import StaticTreeOptions, options_of
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, Growth


class Pick(NamedTuple):
    """The next choice below a row of the last layer becomes a row; ``is_drafted`` if choices below it are wanted."""

    parent: int
    is_drafted: bool = True


class StaticTree(Method):
    """A tree of layers, besides forced rows after the root. Another shape of tree is a subclass with other ``picks``."""

    tree: InjectionTree

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        super().__init__(request, sequence, resources, thread)
        self.limits = limits = options_of(request, StaticTreeOptions)
        self.keeps_best = limits.rows is not None  # of the drafted rows the most probable ones enter, not all
        self.tree = InjectionTree(None if self.grammar is None else self._chain_below)
        self.children = limits.children
        self.choices = limits.choices
        self.whole = 1 + (limits.rows or limits.depth * limits.layer_rows) + self.max_forced
        self._sources = fixed_sources(self, limits.proposers)
        self._room = self.whole  # rows of the next step: less if threads share it
        self._size = 0  # rows of the drafted tree that has yet to enter
        self._layer: list[int] | None = None  # the rows of the last layer, without those above a forced one; None: not drafting
        self._to_draft: Sequence[int] = ()  # the rows to draft next
        self._drafted_layers = 0
        self._chains_left: int | None = None  # forced rows that may still join a layer; None: all

    def picks(self, layer: Sequence[Sequence[float]]) -> list[Pick]:
        """The rows of the next layer, best first. If not all of them fit, the first ones become rows.

        Args:
            layer: the log-chances, of whole paths, of the choices below each row of the last layer, best first. The rows are
                those of the last call, ordered by their parents, or in that order.
        """
        return [Pick(parent) for _, parent in ranked(layer)[: self.limits.layer_rows]]

    @property
    def in_flight(self) -> int:
        return self.tree.num_entered

    def demand(self) -> Demand:
        """The tree, once it is drafted."""
        return Demand(whole=min(self._size, self._room))

    def propose(self, room: int) -> Step | None:
        """The whole tree, or its ``room`` most probable rows."""
        self._room = room
        if not self._size:
            return None
        token_ids, parents = self.tree.enter(min(self._size, room))
        self.root, self._size = None, 0
        entering, below = torch.tensor((token_ids, parents)).unbind()
        return Step(entering, below, log_probs=self.tree.log_probs)

    def draft(self, room: DraftRoom) -> Sequence[int]:
        """Draft the whole tree below a new root: one forward for every layer but the last."""
        if self._layer is None:
            return ()
        if self._drafted_layers:
            self._to_draft = self._grow(self._layer)
        if self._to_draft and self._drafted_layers < self.limits.depth:
            self._drafted_layers += 1
            self.growth = self._growth(self._to_draft)
            return self._to_draft
        self._finish()
        return ()

    def _growth(self, rows: Sequence[int]) -> Growth | None:
        """The layers after that of ``rows``."""
        log_chances = self._sources.log_chances
        if log_chances is None or self.grammar is not None or self.sequence.can_fork:
            return None
        later = self.limits.depth - self._drafted_layers
        return Growth(later, self._layer_room(), True, log_chances, partial(self.tree.frontier, rows, 0))

    def _grow(self, layer: Sequence[int]) -> list[int]:
        """Add the layer after ``layer``, which was drafted; returns its rows that are to be drafted.

        Forced rows take at most half of a layer.
        """
        picks, left = self.picks([self.tree.choices_below(row) for row in layer]), self._layer_room()
        self._chains_left, self._layer = left // 2, []
        if self.grammar is None:
            picks = sorted(picks[:left], key=lambda pick: pick.parent)
        to_draft = list[int]()
        for pick in picks:
            if left <= 0:
                break
            self._chains_left = min(self._chains_left, left - 1)
            new = self.tree.add_best_below(layer[pick.parent])
            left -= len(new)
            self._chains_left -= len(new) - 1
            self._layer.append(new[-1])
            to_draft += new if pick.is_drafted else ()
        return to_draft

    def _layer_room(self) -> int:
        """Rows of the next layer. If rows are limited, the best ones may all be in one layer."""
        room = self._room if self.limits.rows else max(self._room // self.limits.depth, 1)
        return min(self.limits.layer_rows, room)

    def _finish(self) -> None:
        """End drafting: the tree may enter."""
        self._layer, self._chains_left, size = None, 0, self.whole
        if self.keeps_best and self.limits.rows is not None:
            size = self.tree.num_certain + self.limits.rows
        else:
            self.tree.drop_choices()
        self._size = sum(1 for _ in islice(self.tree.entering_chances(), size))

    def _chain_below(self, path: Sequence[int]) -> Sequence[int]:
        return chain_below(self.grammar, path)[: self._chains_left]

    def drafted(self, rows: Sequence[int], candidates: Candidates | None) -> Proposals | None:
        return self._sources.propose(self.tree, rows, candidates)

    def accept(self, accepted: Accepted) -> None:
        changes, _, lessons = self.tree.advance_to(accepted.tokens)
        self._sources.learn(lessons)
        self._follow(changes)
        if self.tree.num_entered:  # the thread has ended: else another token would follow
            self.root = self._layer = None
            self._size = 0
        else:
            self.cut()
            self.plant(accepted.tokens[-1])

    def cut(self) -> None:
        self._follow(self.tree.cut())
        self.root, self._layer, self._size = None, None, 0

    def plant(self, token: int) -> None:
        super().plant(token)
        self._sources.append((token,))
        self._chains_left = None
        self.tree.plant(token)
        self._layer, self._to_draft, self._drafted_layers = [self.tree.num_rows - 1], range(self.tree.num_rows), 0


def ranked(layer: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """The choices below all rows of a layer with their parents, best first; of equally good ones, the earlier parent's."""
    choices = [(chance, parent) for parent, chances in enumerate(layer) for chance in chances]
    return sorted(choices, key=lambda choice: -choice[0])
