"""A cache in which every answer of a batch fills its own slots, so that answers of different lengths waste none.

Owns keys and values of all layers. It does not know which slots a row attends to. Shapes: B answers, H heads, K new rows,
S slots, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_GROWTH = 64  # slots


class SlotCache:
    """Keys and values of a batch of answers.

    Attributes:
        used: number of slots that each answer has filled.
        layers: what a transformers model takes as ``past_key_values``.
    """

    def __init__(self, num_answers: int) -> None:
        self.used = [0] * num_answers
        self.layers = Cache(layer_class_to_replicate=lambda: _Layer(self))
        self._slots_BK = torch.zeros(num_answers, 0, dtype=torch.int64)

    @property
    def num_slots(self) -> int:
        """Slots that the new rows' keys are in, at most: S of the attention mask."""
        return max(self.used) + self._slots_BK.shape[1]

    def reserve(self, num_rows: int, device: torch.device) -> None:
        """Let the next forward pass write ``num_rows`` rows of every answer behind its filled slots."""
        self._slots_BK = (torch.tensor(self.used)[:, None] + torch.arange(num_rows)).to(device)

    def fill(self, counts: list[int]) -> None:
        """Of each answer, the first rows that were written are kept; later ones, which are padding, are overwritten."""
        self.used = [used + count for used, count in zip(self.used, counts, strict=True)]

    def select(self, numbers: list[int]) -> None:
        """Make the answers with these numbers the batch; one that is named twice is copied."""
        self.used = [self.used[number] for number in numbers]
        self.layers.batch_select_indices(torch.tensor(numbers, dtype=torch.int64, device=self._slots_BK.device))

    def written(self, stored_BHSD: Tensor, new_BHKD: Tensor) -> Tensor:
        """``stored``, enlarged if necessary, with the new rows in their slots."""
        missing = self.num_slots - stored_BHSD.shape[2]
        if missing > 0:
            batch, heads, _, size = stored_BHSD.shape
            more = stored_BHSD.new_zeros(batch, heads, missing + _GROWTH, size)
            stored_BHSD = torch.cat([stored_BHSD, more], dim=2)
        answers_B1 = torch.arange(len(self.used), device=new_BHKD.device)[:, None]
        stored_BHSD[answers_B1, :, self._slots_BK] = new_BHKD.transpose(1, 2)
        return stored_BHSD


class _Layer(DynamicLayer):
    """Keys and values of one layer: [B, H, S, D] each, with room for further slots."""

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of all slots, after writing those of the new rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = self.owner.written(self.keys, key_states)
        self.values = self.owner.written(self.values, value_states)
        return self.keys[:, :, : self.owner.num_slots], self.values[:, :, : self.owner.num_slots]
