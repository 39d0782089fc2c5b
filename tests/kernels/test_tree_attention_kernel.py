"""Tree attention in Triton's interpreter: as ``LaneAttention`` computes it, and for each row the same bits in any company."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from support.kernels import Launch, interpreted, recorded
from torch import Tensor

from pipedec.families import LayerShape, Reach
from pipedec.model import KVCache, KVPool, LaneRows
from pipedec.model.attention import LaneAttention, LayersShape
from pipedec.model.kernels.tree_attention import paged_attention, reference, tile_tokens, visible_slots
from pipedec.model.row_tables import MOST_REQUESTS, RowTables
from pipedec.tree import Visibility

# Layers of real models: heads, key-value heads and widths in their proportions, windows and chunks of a few tokens.
LAYERS = {
    "llama-3-70b": LayerShape(8, 1, 32, 32),
    "llama-3.2-1b": LayerShape(8, 2, 16, 16),
    "qwen3-8b": LayerShape(8, 2, 32, 32),
    "qwen2.5-7b": LayerShape(14, 2, 16, 16),
    "olmo-2-7b": LayerShape(4, 4, 16, 16),
    "mistral-7b": LayerShape(8, 2, 16, 16, Reach(40)),
    "phi-3-mini": LayerShape(4, 4, 24, 24, Reach(33)),
    "gemma-2-9b": LayerShape(4, 2, 32, 32, Reach(30), scale=0.07, softcap=5.0),
    "gemma-3-27b": LayerShape(4, 2, 16, 16, scale=0.1),
    "gpt-oss-20b": LayerShape(16, 2, 16, 16, Reach(17)),
    "llama-4-scout": LayerShape(10, 2, 16, 16, Reach(50, is_chunk=True)),
    "unequal-widths": LayerShape(4, 2, 24, 16),
}
WITH_SINKS = ("gpt-oss-20b",)
BLOCK, SLOTS, PROMPT_TOKENS = 16, 1024, 5


@dataclass(frozen=True)
class Asked:
    """The rows of one request: tokens of its past, older rows of its tree, rows of this step, of which some are masks."""

    past: int
    older: int
    rows: int
    masks: int = 0
    is_prompt: bool = False


REQUESTS = [Asked(50, 4, 3), Asked(3, 0, 5, is_prompt=True), Asked(0, 0, 1), Asked(20, 2, 2)]
WITH_MASKS = [Asked(30, 0, 7, masks=2, is_prompt=True), Asked(40, 3, 4)]


def pool_of(shape: LayerShape, has_prompt: bool) -> KVPool:
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randn(1, 2, shape.num_kv_heads, PROMPT_TOKENS, shape.key_dim, generator=generator) if has_prompt else None
    pool = KVPool([shape.cached], torch.float32, SLOTS, BLOCK, prompt)
    for plane in pool.planes:
        values = torch.randn(plane.shape, generator=generator)
        values[..., pool.slots : pool.slots + len(pool.prompt_slots), :] = plane[
            ..., pool.slots : pool.slots + len(pool.prompt_slots), :
        ]
        plane.copy_(values)
    return pool


def lanes_of(pool: KVPool, requests: list[Asked], seed: int = 5) -> list[LaneRows]:
    """Requests whose blocks are scattered over the pool."""
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    free = list(range(pool.slots // BLOCK))
    numbers.shuffle(free)
    lanes = []
    for asked in requests:
        blocks = -(-(asked.past + asked.older + asked.rows) // BLOCK)
        cache = KVCache(pool, [(BLOCK * free.pop(), BLOCK) for _ in range(blocks)], with_prompt=asked.masks > 0)
        if asked.past:
            cache.append(asked.past, to_past=True)
        if asked.is_prompt:
            positions = torch.arange(asked.past, asked.past + asked.rows)
            lanes.append(LaneRows(positions, cache, None, asked.past + asked.rows, num_masks=asked.masks))
            continue
        cache.append(asked.older)
        rows, columns = asked.rows, asked.older + asked.rows
        seen = torch.rand(rows, columns, generator=generator) < 0.4
        seen[:, asked.older :] &= torch.ones(rows, rows, dtype=torch.bool).tril()
        seen[torch.arange(rows), asked.older + torch.arange(rows)] = True
        positions = asked.past + torch.randint(0, 9, (columns,), generator=generator)
        lanes.append(
            LaneRows(positions[asked.older :], cache, Visibility(seen, asked.past, lambda positions=positions: positions))
        )
    return lanes


class Case:
    """Queries of some requests over a pool of random keys and values."""

    def __init__(self, shape: LayerShape, requests: list[Asked], has_sinks: bool = False) -> None:
        self.shape = shape
        self.pool = pool_of(shape, any(asked.masks for asked in requests))
        self.lanes = lanes_of(self.pool, requests)
        generator = torch.Generator().manual_seed(7)
        self.queries = torch.randn(sum(asked.rows for asked in requests), shape.num_heads, shape.key_dim, generator=generator)
        self.sinks = torch.randn(shape.num_heads, generator=generator) if has_sinks else None
        self.positions = torch.cat([lane.positions for lane in self.lanes])

    def by_kernel(self, lanes: list[LaneRows], queries: Tensor, positions: Tensor, rows: int) -> Tensor:
        """Of some of the requests, in a bucket of ``rows``."""
        shape, pool = self.shape, self.pool
        tables = RowTables(torch.full((20_000,), -7, dtype=torch.int32), rows, len(lanes), [tile_tokens(shape, queries.dtype)])
        tables.fill(lanes, shape.reach is not None)
        padded, padded_positions = queries.new_zeros(rows, *queries.shape[1:]), positions.new_zeros(rows)
        padded[: len(queries)], padded_positions[: len(queries)] = queries, positions
        places = padded, *pool.keys_values(0), tables, padded_positions
        with interpreted():
            out = paged_attention(*places, shape, BLOCK, pool.prompt_slots, self.sinks)
        visible = visible_slots(tables, padded_positions, shape.reach, BLOCK, pool.keys_values(0)[0].shape[1], pool.prompt_slots)
        torch.testing.assert_close(reference(padded, *pool.keys_values(0), visible, shape, self.sinks), out, atol=2e-6, rtol=0)
        assert not out[len(queries) :].any(), "padding"
        return out[: len(queries)]

    def by_lanes(self) -> Tensor:
        shape = LayersShape({0: self.shape}, 1, torch.float32)
        return LaneAttention(self.lanes, shape).attend(self.queries, 0, self.sinks)


@pytest.mark.parametrize("name", LAYERS)
def test_all_requests_at_once_equal_one_after_the_other(name: str) -> None:
    case = Case(LAYERS[name], REQUESTS, name in WITH_SINKS)
    found = case.by_kernel(case.lanes, case.queries, case.positions, len(case.queries))
    torch.testing.assert_close(found, case.by_lanes(), atol=2e-6, rtol=0)


def test_mask_rows_alone_see_the_learned_prompt() -> None:
    case = Case(LayerShape(4, 2, 16, 16), WITH_MASKS)
    found = case.by_kernel(case.lanes, case.queries, case.positions, 16)
    torch.testing.assert_close(found, case.by_lanes(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt-oss-20b"])
def test_a_row_has_the_same_bits_alone_and_in_company(name: str) -> None:
    case = Case(LAYERS[name], REQUESTS, name in WITH_SINKS)
    found, first = case.by_kernel(case.lanes, case.queries, case.positions, 16), 0
    for lane in case.lanes:
        own = slice(first, first + lane.num_rows)
        alone = case.by_kernel([lane], case.queries[own], case.positions[own], lane.num_rows)
        assert torch.equal(alone, found[own])
        first = own.stop


def test_nothing_is_read_beyond_a_requests_slots() -> None:
    case = Case(LAYERS["llama-3.2-1b"], REQUESTS)
    used = torch.zeros(case.pool.keys_values(0)[0].shape[1], dtype=torch.bool)
    for lane in case.lanes:
        for slots in lane.slots():
            used[slots.start : slots.stop] = True
    for plane in case.pool.keys_values(0):
        plane[:, ~used] = torch.nan
    assert case.by_kernel(case.lanes, case.queries, case.positions, 16).isfinite().all()


def launches(dtype: torch.dtype) -> list[Launch]:
    """At the sizes of real layers, with all variants of the kernel."""
    layers = [
        LayerShape(64, 8, 128, 128), LayerShape(32, 8, 64, 64), LayerShape(32, 8, 128, 128, Reach(4096)),
        LayerShape(64, 8, 64, 64, Reach(128)), LayerShape(16, 8, 256, 256, Reach(4096), softcap=50.0),
        LayerShape(40, 8, 128, 128, Reach(8192, is_chunk=True)), LayerShape(32, 32, 96, 96),
    ]  # fmt: skip
    table, positions = (torch.empty(20_000, dtype=kind, device="meta") for kind in (torch.int32, torch.int64))
    with recorded() as found:
        for shape in layers:
            q, k, v = (
                torch.empty(size, dtype=dtype, device="meta")
                for size in ((16, shape.num_heads, shape.key_dim), (8, 8192, shape.key_dim), (8, 8192, shape.value_dim))
            )
            tables = RowTables(table, 16, MOST_REQUESTS, [tile_tokens(shape, dtype)])
            sinks = torch.empty(shape.num_heads, dtype=dtype, device="meta") if shape.key_dim == 64 else None
            prompt = range(8192 if shape.reach is None else 0, 8192)
            paged_attention(q, k, v, tables, positions[:16], shape, 256, prompt, sinks)
    return found
