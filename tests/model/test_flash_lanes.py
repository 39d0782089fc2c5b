"""Attention batched over requests, as on a GPU, equals attention request by request; the kernel is a stand-in."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny
from support.examples import examples
from support.flash_stand_in import flash_attn_varlen_func
from support.random_requests import Requests
from support.slot_books import SlotAllocator

from pipedec.families import model_config
from pipedec.model import BitaWeights, KVCache, LaneRows, StageModel
from pipedec.tree import Visibility

LAYERS = range(1, 4)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
}


CASES = [*((family, "pipedec") for family in MODELS), ("mistral", "transformers"), ("qwen3", "transformers")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    path = tmp_path_factory.mktemp("target")
    family, impl = request.param
    save_tiny(family, path, **MODELS[family])
    weights = save_random_bita(path / "bita", path, 2)
    stage = StageModel.load(path, LAYERS, torch.float64, "cpu", model_config(path, impl))
    stage.attach(BitaWeights(weights.prompt[LAYERS.start : LAYERS.stop].double(), weights.masks.double()))
    return stage


@pytest.mark.in_turn(2)
@examples(60)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 6), block=st.sampled_from([2, 5, 16]))
def test_all_requests_at_once_equal_one_after_the_other(stage: StageModel, seed: int, count: int, block: int) -> None:
    plain, batched = (Requests(stage, seed, count, block, is_scattered) for is_scattered in (False, True))
    for _ in range(6):
        stage.flash, stage.uses_tables = flash_attn_varlen_func, True
        found = batched.forward()
        stage.flash, stage.uses_tables = None, False
        torch.testing.assert_close(found, plain.forward(), atol=1e-11, rtol=0)
        plain.advance()
        batched.advance()


def test_a_layer_takes_one_call_for_all_chunks(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    stage, count = StageModel.load(tmp_path, range(1, 2), torch.float64, "cpu"), 7
    pool, allocator = stage.make_pool(100, 4), SlotAllocator(100, 4, random.Random(3))
    caches = [KVCache(pool, allocator.take(number, 6)) for number in range(count)]
    inputs = torch.randn(3 * count, 32, dtype=torch.float64)
    calls = list[int]()

    def counted(*arguments: Any, **options: Any) -> Any:
        """Notes the number of requests."""
        calls.append(len(arguments[3]) - 1)
        return flash_attn_varlen_func(*arguments, **options)

    stage.flash = counted
    stage.forward(inputs, [LaneRows(torch.arange(3), cache, None, 3) for cache in caches])
    assert calls == [count]
    root = Visibility(torch.ones(1, 1, dtype=torch.bool), 3, lambda: torch.tensor([3]))
    trees = [LaneRows(torch.tensor([3]), cache, root) for cache in caches[:4]]
    chunks = [LaneRows(torch.arange(3, 5), cache, None, 5) for cache in caches[4:]]
    stage.forward(inputs[: 4 + 2 * 3], [*trees, *chunks])
    assert calls == [count], "rows of trees are in no call"
