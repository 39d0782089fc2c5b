"""Plain pipeline parallelism (``pp``): one row passes through all stages for every token. The baseline without speculation."""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import NO_MASKS, Request, Step, Verdict
from pipedec.decoding.controller import TimestepTiming


class PlainPipeline:
    """Proposes the last accepted token alone, then waits for the next verdict."""

    masks = NO_MASKS

    def __init__(self, request: Request, device: torch.device | str = "cpu") -> None:
        self.hits = 0
        self.misses = 0
        self._device = device
        self._root: int | None = None
        self.room = 1
        self.tree = None

    def prefill(self, token_ids: Tensor) -> None:
        """Nothing to do: there is no draft model."""

    def draft(self) -> None:
        """Nothing to do: there is no draft model."""

    def apply(self, verdict: Verdict) -> None:
        self._root = verdict.tokens[-1] if verdict.finished is None else None
        self.misses += verdict.finished is None

    def cut(self) -> None:
        """Drop the root."""
        self._root = None

    def plant(self, token: int) -> None:
        """Start again from a certain token."""
        self._root = token

    def propose(self) -> Step | None:
        if self._root is None:
            return None
        token, self._root = self._root, None
        return Step(
            token_ids=torch.tensor([token], dtype=torch.int64, device=self._device),
            parents=torch.tensor([-1], dtype=torch.int64, device=self._device),
        )

    def observe(self, timing: TimestepTiming) -> None:
        """Nothing to adapt."""
