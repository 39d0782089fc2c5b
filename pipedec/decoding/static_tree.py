"""Static tree pipeline parallelism (``stpp``, PipeDec §4.2, after SpecInfer): a whole tree enters in one step.

After a verdict the draft model works alone for a timestep: layer by layer it grows the tree below the last accepted token, while
the stages are idle. The tree then passes through all stages as one step. Its verdict accepts the path on which target and tree
agree, and one more token, which is the next root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipedec.core import NO_MASKS, Request, Step, Verdict
from pipedec.decoding.controller import TimestepTiming
from pipedec.tree import PredictionTree

if TYPE_CHECKING:
    from pipedec.decoding.method import Drafter


class StaticTree:
    """``depth`` layers of at most ``width`` rows; if ``rows`` is given, the ``rows`` most probable rows of all layers."""

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
        widest = self._limits.rows or self._limits.width
        self.room = 1 + self._limits.depth * widest  # maximum rows of a step; lowered when threads share it
        self._root: int | None = None  # an accepted token whose tree has yet to be drafted
        self._is_drafted = False  # whether there is a drafted tree that has yet to enter

    def prefill(self, token_ids: Tensor) -> None:
        self._drafter.prefill(token_ids, self._prompt_length)

    def draft(self) -> None:
        """Draft the whole tree below a new root: one forward for every layer but the last."""
        if self._root is None:
            return
        layer, self._root = self._tree.plant(self._root), None
        # The ``rows`` most probable rows of the tree are among the ``rows`` most probable of their layers.
        width = min(self._limits.rows or self._limits.width, max(self.room // self._limits.depth, 1))
        for _ in range(self._limits.depth):
            rows = torch.arange(layer.start, layer.stop, device=self._device)
            layer = self._tree.grow(self._drafter.expand(self._tree, rows, self._limits.children), width)
        if self._limits.rows is not None:
            self._drafter.advance(self._tree.keep(self._tree.most_probable(self._limits.rows)))
        self._is_drafted = True

    def apply(self, verdict: Verdict) -> None:
        self._drafter.advance(self._tree.advance(verdict.tokens))
        self._root = verdict.tokens[-1] if verdict.finished is None else None
        self._is_drafted = False
        self.hits += len(verdict.tokens) - 1
        self.misses += verdict.finished is None

    def cut(self) -> None:
        """Drop all rows."""
        self._drafter.advance(self._tree.clear())
        self._root, self._is_drafted = None, False

    def plant(self, token: int) -> None:
        """Start again from a certain token."""
        self._root = token

    @property
    def tree(self) -> PredictionTree:
        return self._tree

    def propose(self) -> Step | None:
        """The whole tree, or its ``room`` most probable rows."""
        if not self._is_drafted:
            return None
        self._is_drafted = False
        if self._tree.num_rows > self.room:
            self._drafter.advance(self._tree.keep(self._tree.most_probable(self.room - 1)))
        return Step(self._tree.token_ids.clone(), self._tree.parents.clone())

    def observe(self, timing: TimestepTiming) -> None:
        """Nothing to adapt: the limits are fixed."""
