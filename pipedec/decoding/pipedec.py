"""PipeDec (paper §3): one layer of the prediction tree enters the pipeline at every timestep.

While the stages compute, the draft model expands the layer that entered last. On a hit, the tree and the draft model's output
are pruned to the subtree of the accepted token, and the next layer is chosen from the remaining candidates. On a miss, the
accepted token becomes the root of a new tree, which enters the draft model and the first stage at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipedec.core import NO_MASKS, Request, Step, Verdict
from pipedec.decoding.controller import TimestepTiming
from pipedec.tree import Candidates, PredictionTree

if TYPE_CHECKING:
    from pipedec.decoding.method import Drafter


class PipeDec:
    """Layer-wise dynamic tree: the ``width`` most probable paths per layer, ``children`` candidates per row."""

    masks = NO_MASKS

    def __init__(self, request: Request, drafter: Drafter, device: torch.device | str = "cpu") -> None:
        self.hits = 0
        self.misses = 0
        self._limits = request.tree.with_defaults()
        self._prompt_length = len(request.prompt_token_ids)
        self._drafter = drafter
        self._drafter.begin()
        self._tree = PredictionTree(device)
        self._tree.reset(self._prompt_length)
        self._device = device
        self._root: int | None = None  # an accepted token that has yet to enter
        self.room = self._limits.width  # maximum rows of a step; lowered when threads share it
        self._layer = slice(0, 0)  # the rows that entered last
        self._candidates: Candidates | None = None  # their children, as drafted

    def prefill(self, token_ids: Tensor) -> None:
        self._drafter.prefill(token_ids, self._prompt_length)

    def draft(self) -> None:
        rows = torch.arange(self._layer.start, self._layer.stop, device=self._device)
        self._candidates = self._drafter.expand(self._tree, rows, self._limits.children) if len(rows) else None

    def apply(self, verdict: Verdict) -> None:
        advance = self._tree.advance(verdict.tokens)
        self._drafter.advance(advance)
        if self._candidates is not None:
            self._candidates = self._candidates.advanced(advance)
        self._layer = slice(0, 0)
        self._root = None if advance.hit or verdict.finished else verdict.tokens[-1]
        if verdict.finished is None:
            self.hits += advance.hit
            self.misses += not advance.hit

    def cut(self) -> None:
        """Drop all rows."""
        self._drafter.advance(self._tree.clear())
        self._layer, self._candidates, self._root = slice(0, 0), None, None

    def plant(self, token: int) -> None:
        """Start again from a certain token."""
        self._root = token

    @property
    def tree(self) -> PredictionTree:
        return self._tree

    def propose(self) -> Step | None:
        """The root after a miss, else the next layer; None if no candidates are left, because the width limit cut them off."""
        if self._root is not None:
            self._layer = self._tree.plant(self._root)
            self._root = None
        elif self._candidates is not None and len(self._candidates.rows):
            self._layer = self._tree.grow(self._candidates, min(self._limits.width, self.room))
        else:
            self._layer = slice(0, 0)
        if self._layer.start == self._layer.stop:
            return None
        return Step(self._tree.token_ids[self._layer].clone(), self._tree.parents[self._layer].clone())

    def observe(self, timing: TimestepTiming) -> None:
        """Nothing to adapt: the limits are fixed."""
