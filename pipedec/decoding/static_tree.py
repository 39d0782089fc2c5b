"""Static tree pipeline parallelism (``stpp``, paper §4.2, after SpecInfer): a whole tree enters in one step, then waits.

After a verdict the draft works alone for a timestep: layer by layer it grows the tree below the last accepted token, and the
stages stand still. The tree then crosses all stages together, and its verdict is the path that the target agrees with, and one
token more, which is the next root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import NO_MASKS, Request, Step, Verdict
from pipedec.decoding.controller import Beat
from pipedec.decoding.interface import Drafter
from pipedec.methods import StaticTreeOptions, options_of
from pipedec.tree import PredictionTree


class StaticTree:
    """``depth`` layers of at most ``width`` rows; with ``rows``, that many rows of whatever layer, the likeliest first."""

    masks = NO_MASKS

    def __init__(self, request: Request, drafter: Drafter, device: torch.device | str = "cpu") -> None:
        self.hits = 0
        self.misses = 0
        self._limits = options_of(request, StaticTreeOptions)
        self._prompt_length = len(request.prompt_token_ids)
        self._drafter = drafter
        self._drafter.begin()
        self._tree = PredictionTree(device)
        self._tree.reset(self._prompt_length)
        self._device = device
        widest = self._limits.rows or self._limits.width
        self.room = 1 + self._limits.depth * widest  # rows that may enter, if others need some of them
        self._root: int | None = None  # an accepted token whose tree has yet to be drafted
        self._is_drafted = False  # the tree, which has yet to enter

    def prefill(self, token_ids: Tensor) -> None:
        self._drafter.prefill(token_ids, self._prompt_length)

    def draft(self) -> None:
        """The whole tree below a new root: one forward per layer. The last layer's own children are nobody's concern."""
        if self._root is None:
            return
        layer, self._root = self._tree.plant(self._root), None
        # No row outside the likeliest of its layer is among the likeliest of all, so layers of that width are enough.
        width = min(self._limits.rows or self._limits.width, max(self.room // self._limits.depth, 1))
        for _ in range(self._limits.depth):
            rows = torch.arange(layer.start, layer.stop, device=self._device)
            layer = self._tree.grow(self._drafter.expand(self._tree, rows, self._limits.children), width)
        if self._limits.rows is not None:
            self._drafter.advance(self._tree.keep(self._tree.likeliest(self._limits.rows)))
        self._is_drafted = True

    def apply(self, verdict: Verdict) -> None:
        self._drafter.advance(self._tree.advance(verdict.tokens))
        self._root = verdict.tokens[-1] if verdict.finished is None else None
        self._is_drafted = False
        self.hits += len(verdict.tokens) - 1
        self.misses += verdict.finished is None

    def cut(self) -> None:
        """Forget all rows."""
        self._drafter.advance(self._tree.clear())
        self._root, self._is_drafted = None, False

    def plant(self, token: int) -> None:
        """Begin anew with a token that is certain."""
        self._root = token

    @property
    def tree(self) -> PredictionTree:
        return self._tree

    def propose(self) -> Step | None:
        """The whole tree, or as many of its likeliest rows as there is room for."""
        if not self._is_drafted:
            return None
        self._is_drafted = False
        if self._tree.num_rows > self.room:
            self._drafter.advance(self._tree.keep(self._tree.likeliest(self.room - 1)))
        return Step(self._tree.token_ids.clone(), self._tree.parents.clone())

    def observe(self, beat: Beat) -> None:
        """The tree does not change."""
