"""The attention mask of an answer in several decode threads, whose rows see parts of the past and of several trees."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sight:
    """Which of S cache slots R rows attend to. Slots of the past come first, then those of all trees.

    Attributes:
        seen: bool [R, S], ``[i, j]``: row i attends to slot j.
        slot_positions: int64 [S], position id of the token in each slot.
        shared: number of leading slots visible to every row.
    """

    seen: Tensor
    slot_positions: Tensor
    shared: int

    def of(self, rows: slice, hidden_slots: int = 0) -> Sight:
        """The mask of some of the rows, without the last ``hidden_slots`` slots."""
        slots = slice(0, self.seen.shape[1] - hidden_slots)
        return Sight(self.seen[rows, slots], self.slot_positions[slots], self.shared)
