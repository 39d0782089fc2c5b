"""Random requests of one pool: prompts, trees and masks, which come and go between forwards."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from pipedec.model import KVCache, LaneRows, StageModel
from pipedec.tree import Visibility
from support.slot_books import SlotAllocator


class Requests:
    """Random requests of one pool, and what the forwards of their rows give."""

    def __init__(self, stage: StageModel, seed: int, count: int, block: int, is_scattered: bool) -> None:
        self._stage, self._device, self._random = stage, stage.device, random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        pool = stage.make_pool(400 * block, block)
        self._books = SlotAllocator(pool.slots, block, random.Random(seed) if is_scattered else None)
        self._has_masks = [bool(pool.prompt_slots) and self._random.random() < 0.4 for _ in range(count)]
        self._caches = [KVCache(pool, with_prompt=has_masks) for has_masks in self._has_masks]
        self._has_prompt = [self._random.random() < 0.1 for _ in range(count)]

    def forward(self) -> Tensor:
        """One step of some of the requests."""
        chosen = self._random.sample(range(len(self._caches)), self._random.randint(1, len(self._caches)))
        lanes = [self._rows(index) for index in chosen]
        inputs = torch.randn(sum(lane.num_rows for lane in lanes), 32, generator=self._generator, dtype=torch.float64)
        return self._stage.forward(inputs.to(self._device, self._stage.dtype), lanes)

    def advance(self) -> None:
        for cache, has_prompt in zip(self._caches, self._has_prompt, strict=True):
            if has_prompt and self._random.random() < 0.6:
                order = self._random.sample(range(cache.tree_length), self._random.randint(0, cache.tree_length))
                split = self._random.randint(0, len(order))
                kept = sorted(order[split:])
                cache.commit(self._indices(order[:split]), self._indices(kept))

    def _indices(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _rows(self, index: int) -> LaneRows:
        cache, chooser = self._caches[index], self._random
        masks = chooser.randint(0, 2) if self._has_masks[index] else 0
        rows = chooser.randint(1, 5) + masks
        cache.extend(self._books.take(index, cache.length + rows))
        if not self._has_prompt[index]:
            self._has_prompt[index] = chooser.random() < 0.5
            masks, rows = (masks, rows) if self._has_prompt[index] else (0, rows - masks)
            positions = torch.arange(cache.length, cache.length + rows, device=self._device)
            return LaneRows(positions, cache, None, cache.length + rows, masks)
        shared = cache.past_length if chooser.random() < 0.5 else chooser.randint(0, cache.past_length)
        slots = cache.length - shared + rows
        seen = torch.rand(rows, slots, generator=self._generator) < 0.6
        seen[:, slots - rows :] = torch.eye(rows, dtype=torch.bool)
        slot_positions = torch.randint(shared, cache.length + 4, (slots,), generator=self._generator).to(self._device)
        visibility = Visibility(seen.to(self._device), shared, lambda: slot_positions)
        return LaneRows(slot_positions[slots - rows :], cache, visibility, num_masks=masks)
