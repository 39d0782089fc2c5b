"""The kernel that norms, rotates and caches equals torch's operations, and writes nowhere else."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

kernels = pytest.importorskip("support.kernels")

from pipedec.families import KVShape  # noqa: E402
from pipedec.model import KVPool  # noqa: E402
from pipedec.model.kernels.rope_write import reference, rope_write  # noqa: E402

# Query heads, key-value heads and head size in the proportions of Llama 3.2 1B, Llama 3 70B, Qwen2.5 0.5B and 7B, Qwen3 0.6B,
# Phi 3 mini and Gemma 2B; then an uneven one.
HEADS = ((8, 2, 16), (16, 2, 32), (14, 2, 16), (7, 1, 32), (8, 4, 32), (6, 6, 24), (8, 1, 64), (3, 3, 6))
REAL_HEADS = ((32, 8, 64), (32, 8, 128), (64, 8, 128))
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 4e-3}  # norms are in float32; last bits of float16
ROWS = 5
SLOTS = slice(7, 7 + ROWS), torch.tensor([30, 2, 31, 9, 16], dtype=torch.int32), torch.arange(ROWS).flip(0)


def step(heads, kv_heads, size, dtype, is_normed, device="cpu"):
    """A pool full of NaN, and the arguments without slots: queries and keys, values, cosines and sines, norms."""
    generator = torch.Generator().manual_seed(heads * size)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    pool = KVPool([KVShape(kv_heads, size, size)] * 2, dtype, 32, 16, device=device)
    for plane in pool.planes:
        plane.fill_(torch.nan)
    qkv = random(ROWS, heads + 2 * kv_heads, size)
    norms = tuple((random(size), eps) for eps in (1e-6, 1e-2)) if is_normed else None
    return pool, qkv, (random(ROWS, 1, size), random(ROWS, 1, size)), norms


def computed(function, pool, qkv, cos_sin, norms, slots, rows=slice(None)):
    """Queries, and all of the pool, after ``rows`` of a step."""
    kv_heads, qkv = pool.keys_values(1)[0].shape[0], qkv.clone()[rows]
    cos_sin = tuple(part[rows] for part in cos_sin)
    queries = function(qkv[:, :-kv_heads], qkv[:, -kv_heads:], cos_sin, pool, 1, slots, norms)
    return queries, *(plane.clone() for plane in pool.planes)


def launches(dtype: torch.dtype):
    """Launches at the shapes of Llama 3.2 1B, Qwen3 8B and Llama 3 70B, without and with norms."""
    slots = torch.empty(ROWS, dtype=torch.int32, device="meta")
    with kernels.recorded() as found:
        for heads in REAL_HEADS:
            for is_normed in (False, True):
                computed(rope_write, *step(*heads, dtype, is_normed, "meta"), slots)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_normed", [False, True])
def test_heads_are_rotated_and_cached_as_by_torch(dtype, is_normed):
    for heads, slots in zip(HEADS, cycle(SLOTS), strict=False):
        with kernels.interpreted():
            found = computed(rope_write, *step(*heads, dtype, is_normed), slots)
        expected = computed(reference, *step(*heads, dtype, is_normed), slots)
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


def test_a_row_alone_is_that_in_company():
    for heads in HEADS:
        with kernels.interpreted():
            together, _ = computed(rope_write, *step(*heads, torch.float32, True), slice(3, 3 + ROWS))
            alone, _ = computed(rope_write, *step(*heads, torch.float32, True), slice(5, 6), slice(2, 3))
        assert torch.equal(alone, together[2:3])
