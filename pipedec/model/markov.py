"""A BiTA's Markov table: how much likelier the token before makes each prediction of a mask (DSpark's Markov head).

The masks of a group predict their tokens independently of each other. The table makes them depend on the token before: the
logit of token v at mask m after token u grows by Σ_k gates[m, k] · previous[u, k] · following[v, k]. Rank 0 keeps the table and
ranks a mask's predictions anew for every candidate before them. Shapes: V vocabulary, M masks, r rank, K predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NAMES = ("markov_previous", "markov_following", "markov_gates")  # what a BiTA's file calls the tensors


@dataclass(frozen=True)
class MarkovTable:
    """In float32. Rows are multiplied on the host, one candidate at a time."""

    previous: NDArray[np.float32]  # [V, r]
    following: NDArray[np.float32]  # [V, r]
    gates: NDArray[np.float32]  # [M, r]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> MarkovTable:
        """The table of these named tensors."""
        return cls(*(tensors[name].float().numpy() for name in NAMES))

    @staticmethod
    def shapes(vocab_size: int, num_masks: int, rank: int) -> dict[str, tuple[int, ...]]:
        """The shapes of ``tensors``; none without a table, whose rank is 0."""
        return dict(zip(NAMES, ((vocab_size, rank), (vocab_size, rank), (num_masks, rank)), strict=True)) if rank else {}

    def bias(self, mask: int, before: int, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Added to the logits of ``token_ids`` at ``mask`` if the token before is ``before``: [K]."""
        return self.following.take(token_ids, axis=0) @ (self.gates[mask] * self.previous[before])
