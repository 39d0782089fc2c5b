"""A forward over rows of several requests gives each what a forward of its own gives, with every rope type and with windows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.checkpoints import save_tiny, save_tiny_llama
from support.kv_caches import read_cache
from support.slot_books import SlotAllocator
from support.stage_chain import ROPES

from pipedec.families import ModelImpl, model_config
from pipedec.model import KVCache, KVPool, LaneRows, StageModel
from pipedec.tree import Visibility

PROMPTS = (5, 21, 9)  # of which the first part has entered already; the last request decodes
CHUNK = 4


def lanes_of(pool: KVPool, allocator: SlotAllocator, stage: StageModel) -> list[LaneRows]:
    """Two prompts with a chunk still to come, and a root with two children."""
    lanes = []
    for length in PROMPTS:
        cache = KVCache(pool, allocator.take(length, length + CHUNK))
        first = length if length == PROMPTS[-1] else length - CHUNK
        positions = torch.arange(first)
        stage.forward(inputs(first, length), [LaneRows(positions, cache, None, length)])
        if first < length:
            lanes.append(LaneRows(torch.arange(first, length), cache, None, length))
    mask = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    positions = PROMPTS[-1] + torch.tensor([0, 1, 1])
    return [*lanes, LaneRows(positions, cache, Visibility(mask, PROMPTS[-1], lambda: positions))]


def inputs(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "impl"),
    [*((name, "pipedec") for name in [*ROPES, "window"]), ("dynamic", "transformers"), ("window", "transformers")],
)
def test_rows_of_several_requests_in_one_forward(tmp_path: Any, name: str, impl: ModelImpl) -> None:
    if name == "window":
        save_tiny("mistral", tmp_path, sliding_window=5)
    else:
        save_tiny_llama(tmp_path, rope_parameters={"rope_theta": 1000.0, **ROPES[name]}, max_position_embeddings=16)
    stage = StageModel.load(tmp_path, range(1, 4), torch.float64, "cpu", model_config(tmp_path, impl))
    together, apart = (lanes_of(stage.make_pool(88, 8), SlotAllocator(88, 8, rng), stage) for rng in (None, random.Random(1)))
    rows = [inputs(lane.num_rows, 50 + index) for index, lane in enumerate(together)]
    found = stage.forward(torch.cat(rows), together)
    expected = torch.cat([stage.forward(own, [lane]) for own, lane in zip(rows, apart, strict=True)])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    for one, other in zip(together, apart, strict=True):
        assert (one.cache.past_length, one.cache.tree_length) == (other.cache.past_length, other.cache.tree_length)
        for layer in range(len(stage.layers)):
            for seen, alone in zip(read_cache(one.cache, layer), read_cache(other.cache, layer), strict=True):
                torch.testing.assert_close(seen, alone, atol=1e-12, rtol=0)
