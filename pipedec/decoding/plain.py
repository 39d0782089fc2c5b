"""Plain pipeline parallelism (``pp``): one row passes through all stages for every token. The baseline without speculation."""

from __future__ import annotations

import torch

from pipedec.core import NO_MASKS, Accepted, Step
from pipedec.decoding.context import MethodContext
from pipedec.decoding.lockstep import Drafting, nothing_to_draft


class PlainPipeline:
    """Proposes the last accepted token alone, then waits for the next verdict."""

    masks = NO_MASKS
    tree = None

    def __init__(self, context: MethodContext, number: int) -> None:
        self._device = context.device
        self._root: int | None = None  # a certain token that has yet to enter
        self.room = 1
        self.in_flight = 0

    @property
    def has_entered(self) -> bool:
        return self._root is None

    @property
    def wanted(self) -> int:
        """The root."""
        return int(self._root is not None)

    def draft(self) -> Drafting:
        return nothing_to_draft()

    def accept(self, accepted: Accepted) -> None:
        self._root, self.in_flight = accepted.tokens[-1], 0

    def cut(self) -> None:
        self._root, self.in_flight = None, 0

    def plant(self, token: int) -> None:
        self._root = token

    def propose(self) -> Step | None:
        if self._root is None:
            return None
        token, self._root, self.in_flight = self._root, None, 1
        return Step(
            token_ids=torch.tensor([token], dtype=torch.int64, device=self._device),
            parents=torch.tensor([-1], dtype=torch.int64, device=self._device),
        )
