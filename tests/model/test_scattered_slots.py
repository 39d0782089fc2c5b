"""Wherever the slots of a request are, and whether it computed its first rows or adopted them, the bits are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny
from support.examples import examples
from support.slot_books import SlotAllocator
from torch import Tensor

from pipedec.families import model_config
from pipedec.model import BitaWeights, KVCache, KVPool, LaneRows, StageModel
from pipedec.tree import Visibility

MASKS, SLOTS = 2, 240
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 5}}


@pytest.fixture(scope="module", params=MODELS)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    path = tmp_path_factory.mktemp("target")
    save_tiny(request.param, path, **MODELS[request.param])
    stage = StageModel.load(path, range(1, 4), torch.float32, "cpu", model_config(path))
    weights = save_random_bita(path / "bita", path, MASKS)
    stage.attach(BitaWeights(weights.prompt[1:4], weights.masks))
    return stage


def chunk(stage: StageModel, cache: KVCache, rows: int, masks: int = 0) -> Tensor:
    """Rows of a prompt, whose inputs depend on where they are."""
    first = cache.past_length
    positions = torch.arange(first, first + rows + masks)
    return stage.forward(inputs(positions), [LaneRows(positions, cache, None, 100, masks)])


def tree(stage: StageModel, cache: KVCache, rows: int) -> Tensor:
    """A chain of rows behind the past, with a group of masks below the last one."""
    past, count = cache.past_length, rows + MASKS
    positions = torch.arange(past, past + count)
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    return stage.forward(
        inputs(positions), [LaneRows(positions, cache, Visibility(seen, past, lambda: positions), num_masks=MASKS)]
    )


def inputs(positions: Tensor) -> Tensor:
    return torch.randn(SLOTS, 32, generator=torch.Generator().manual_seed(0))[positions]


def decoded(
    stage: StageModel, cache: KVCache, allocator: SlotAllocator, sizes: list[int], number: int, shared: int = 0
) -> list[Tensor]:
    """Chunks of the prompt, with masks, then chains that are committed; slots behind the ``shared`` ones are given as needed."""
    outs = list[Tensor]()
    for rows in sizes:
        cache.extend(allocator.take(number, cache.length + rows + MASKS - shared))
        outs.append(chunk(stage, cache, rows, MASKS))
    for rows in sizes:
        cache.extend(allocator.take(number, cache.length + rows + MASKS - shared))
        outs.append(tree(stage, cache, rows))
        cache.advance(torch.arange(rows), torch.arange(0))
    return outs


def prefilled(stage: StageModel, pool: KVPool, allocator: SlotAllocator, rows: int) -> KVCache:
    cache = KVCache(pool, allocator.take(0, rows), with_prompt=True)
    chunk(stage, cache, rows)
    return cache


@examples(40)
@given(
    block=st.sampled_from([1, 3, 8]), rows=st.integers(1, 30), seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)  # fmt: skip
def test_the_bits_do_not_depend_on_where_rows_are_and_who_computed_them(
    stage: StageModel, block: int, rows: int, seed: int, sizes: list[int]
) -> None:
    pools = [stage.make_pool(SLOTS, block) for _ in range(2)]
    together, apart = SlotAllocator(SLOTS, block), SlotAllocator(SLOTS, block, random.Random(seed))
    expected = decoded(stage, prefilled(stage, pools[0], together, rows), together, sizes, 0)
    owner = prefilled(stage, pools[1], apart, rows)
    shared = rows // block * block
    slots = (*apart.runs(0, shared), *apart.take(1, rows - shared))
    copied = (owner.ranges(shared, rows)[0].start, rows - shared)
    adopter = KVCache(pools[1], slots, rows, copied, with_prompt=True)
    found = decoded(stage, adopter, apart, sizes, 1, shared)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
