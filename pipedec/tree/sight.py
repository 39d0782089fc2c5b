"""What rows of an answer in several threads see: not all of the past, and more than their own tree."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sight:
    """What R rows see of S slots, those of the past and then those of all trees.

    Attributes:
        seen: bool [R, S].
        slot_positions: int64 [S], where the token of each slot stands.
        shared: so many slots, the first ones, all rows see.
    """

    seen: Tensor
    slot_positions: Tensor
    shared: int

    def of(self, rows: slice, hidden_slots: int = 0) -> Sight:
        """What some of the rows see, without the last ``hidden_slots`` slots."""
        slots = slice(0, self.seen.shape[1] - hidden_slots)
        return Sight(self.seen[rows, slots], self.slot_positions[slots], self.shared)
