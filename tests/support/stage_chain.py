"""A target cut into stages that run one after another in this process, and rope types, for the tests of the model package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipedec.families import ModelImpl, model_config
from pipedec.model.bita import BitaWeights
from pipedec.model.cache import KVCache
from pipedec.model.rows import LaneRows
from pipedec.model.stage_model import StageModel
from pipedec.tree import Visibility

ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


SLOTS = 256  # of each stage's only cache


BOTH_IMPLS = pytest.mark.parametrize("impl", ["pipedec", "transformers"])


def lone_cache(stage: StageModel, with_prompt: bool = False) -> KVCache:
    """The only cache of a pool."""
    return KVCache(stage.make_pool(SLOTS), ((0, SLOTS),), with_prompt=with_prompt)


class StageChain:
    """Stages with the given numbers of layers, each with its cache. ``bita`` has the tensors of all layers."""

    def __init__(
        self,
        directory: Path,
        cut: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        block: int = 8,
        bita: BitaWeights | None = None,
        impl: ModelImpl = "pipedec",
    ) -> None:
        config = model_config(directory, impl)
        starts = [sum(cut[:index]) for index in range(len(cut))]
        self.stages = [
            StageModel.load(directory, range(start, start + size), dtype, "cpu", config)
            for start, size in zip(starts, cut, strict=True)
        ]
        for stage in self.stages:
            if bita is None:
                break
            of_layers = bita.prompt[stage.layers.start : stage.layers.stop]
            stage.attach(BitaWeights(of_layers.to(dtype), bita.masks.to(dtype)))
        pools = [stage.make_pool(SLOTS, block) for stage in self.stages]
        self.caches = [KVCache(pool, ((0, SLOTS),), with_prompt=bita is not None) for pool in pools]
        self._tree_positions = torch.zeros(0, dtype=torch.int64)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None, prefill_length: int | None = None) -> Tensor:
        return self.stages[-1].logits(self.hidden(ids, positions, mask, prefill_length)[-1])

    def hidden(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None = None, prefill_length: int | None = None, num_masks: int = 0
    ) -> list[Tensor]:
        """The output of every stage for these rows, the last ``num_masks`` of which are masks."""
        visibility = None
        if mask is not None:
            self._tree_positions = torch.cat((self._tree_positions, positions))
            visibility = Visibility(mask, self.caches[0].past_length, lambda: self._tree_positions)
        rows = [ids]
        for stage, cache in zip(self.stages, self.caches, strict=True):
            rows.append(stage.forward(rows[-1], [LaneRows(positions, cache, visibility, prefill_length, num_masks)]))
        return rows[1:]

    def prefill(self, ids: Tensor, chunk: int) -> Tensor:
        starts = range(0, len(ids), chunk)
        parts = [
            self.forward(ids[start : start + chunk], torch.arange(start, min(start + chunk, len(ids))), None, len(ids))
            for start in starts
        ]
        return torch.cat(parts)

    def decode(self, token: Tensor) -> Tensor:
        """Enter one row and commit it at once, as in plain decoding."""
        position = torch.tensor([self.caches[0].past_length])
        logits = self.forward(token.view(1), position, torch.ones(1, 1, dtype=torch.bool))
        self.advance([0], [])
        return logits

    def advance(self, committed: list[int], kept: list[int]) -> None:
        self._tree_positions = self._tree_positions[kept]
        for cache in self.caches:
            cache.commit(torch.tensor(committed, dtype=torch.int64), torch.tensor(kept, dtype=torch.int64))

    def reset(self) -> None:
        self._tree_positions = self._tree_positions[:0]
        for cache in self.caches:
            cache.reset()
