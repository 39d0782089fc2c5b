"""Which slots of the KV cache the rows of a step attend to: the one attention mask of answers in one and in several threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.device import to_device


@dataclass(frozen=True)
class Visibility:
    """The attention mask of R rows over S cache slots: first the past, then the rows of all trees.

    Attributes:
        seen: bool [R, S − shared], ``[i, j]``: row i attends to slot ``shared`` + j.
        shared: number of leading slots that every row attends to: the whole past of an answer in one thread, else the prompt.
            The position id of each is its slot number.
        slot_positions: returns int64 [S − shared], the position id of each of the other slots. Only sliding windows need it.
    """

    seen: Tensor
    shared: int
    slot_positions: Callable[[], Tensor]

    def to(self, device: torch.device | str) -> Visibility:
        """The mask on a device."""
        return Visibility(to_device(self.seen, device), self.shared, lambda: to_device(self.slot_positions(), device))

    def of(self, rows: slice, num_slots: int) -> Visibility:
        """The mask of some of the rows over the first ``num_slots`` slots."""
        return Visibility(self.seen[rows, : num_slots - self.shared], self.shared, self.slot_positions)
