"""Rotary embedding of queries and keys, each head's norm before it, and the write of keys and values to the pool, in one launch.

A program takes some heads of a row: queries, or keys with their values. Shape legend as in ``model.attention``.
"""

from __future__ import annotations

from torch import Tensor

from pipedec.model.cache import KVPool
from pipedec.model.kernels import add_rms_norm, language
from pipedec.model.kernels.language import jit, power_of_two, tl, wide
from pipedec.model.rotary import CosSin, rotate

_HEADS = 8  # of a program

Norm = tuple[Tensor, float]  # weight [D], and eps


def rope_write(
    queries_keys: Tensor, values_RKD: Tensor, cos_sin: CosSin, pool: KVPool, layer: int, slots: slice | Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:  # fmt: skip
    """The rotated queries, [R, H, D], rounded where ``reference`` rounds. Keys and values are written to the pool.

    Args:
        queries_keys: [R, H + K, D], the queries' heads first. They may be changed.
        cos_sin: see ``Rotary.cos_sin``.
        slots: of the pool, where each row's keys and values go: a slice, or integers [R].
        norms: of each head's queries and of its keys, before they are rotated; None without.
    """
    (rows, kv_heads, size), (cos_R1D, sin_R1D) = values_RKD.shape, cos_sin
    heads, (keys_KSD, values_KSD) = queries_keys.shape[1] - kv_heads, pool.keys_values(layer)
    table = slots if isinstance(slots, Tensor) else None
    if isinstance(slots, slice):  # no number, for some of which Triton would compile another kernel
        keys_KSD, values_KSD = keys_KSD[:, slots.start :], values_KSD[:, slots.start :]
    q_RHD = queries_keys.new_empty((rows, heads, size))
    query_norm, key_norm = norms or ((cos_R1D, 0.0), (cos_R1D, 0.0))
    language.launch(
        _rope_write, (rows, -(-heads // _HEADS) - (-kv_heads // _HEADS)), queries_keys, values_RKD, cos_R1D, sin_R1D,
        query_norm[0], key_norm[0], q_RHD, keys_KSD, values_KSD, q_RHD if table is None else table,
        heads, kv_heads, query_norm[1], key_norm[1],
        queries_keys.stride(0), queries_keys.stride(1), values_RKD.stride(0), values_RKD.stride(1),
        keys_KSD.stride(0), keys_KSD.stride(1), values_KSD.stride(0), values_KSD.stride(1),
        SIZE=size, HALF_WIDTH=power_of_two(size // 2), HEADS=_HEADS, NORMED=norms is not None,
        BY_TABLE=table is not None, WIDE=wide(q_RHD.dtype),
    )  # fmt: skip
    return q_RHD


def reference(
    queries_keys: Tensor, values_RKD: Tensor, cos_sin: CosSin, pool: KVPool, layer: int, slots: slice | Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:  # fmt: skip
    """As ``rope_write``, in operations of torch."""
    heads = queries_keys.shape[1] - values_RKD.shape[1]
    if norms is not None:
        for part, norm in zip(queries_keys.tensor_split([heads], 1), norms, strict=True):
            add_rms_norm.reference(part, *norm, out_RX=part)
    rotated = rotate(queries_keys, *cos_sin)
    pool.write(layer, slots, rotated[:, heads:], values_RKD)
    return rotated[:, :heads]


@jit
def _rotated(
    row, head_stride, numbers, mask, cos, sin, weight, eps,
    SIZE: tl.constexpr, HALF_WIDTH: tl.constexpr, NORMED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The two halves of some heads of a ``row``, normed and rotated, [heads, D / 2] each."""
    half: tl.constexpr = SIZE // 2
    dtype: tl.constexpr = row.dtype.element_ty
    dims = tl.arange(0, HALF_WIDTH)
    inside = dims < half
    places = row + numbers[:, None] * head_stride + dims[None, :]
    mask = mask[:, None] & inside[None, :]
    first = tl.load(places, mask=mask, other=0.0)
    second = tl.load(places + half, mask=mask, other=0.0)
    if NORMED:
        first, second = first.to(tl.float32), second.to(tl.float32)
        share = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE + eps)[:, None]
        scale = tl.load(weight + dims, mask=inside, other=0.0).to(WIDE)[None, :]
        first = ((first * share).to(dtype).to(WIDE) * scale).to(dtype)
        scale = tl.load(weight + half + dims, mask=inside, other=0.0).to(WIDE)[None, :]
        second = ((second * share).to(dtype).to(WIDE) * scale).to(dtype)
    first, second = first.to(WIDE), second.to(WIDE)
    turn = tl.load(cos + dims, mask=inside, other=0.0).to(WIDE)[None, :]
    swap = tl.load(sin + dims, mask=inside, other=0.0).to(WIDE)[None, :]
    turned = ((first * turn).to(dtype).to(WIDE) + second * swap).to(dtype)
    turn = tl.load(cos + half + dims, mask=inside, other=0.0).to(WIDE)[None, :]
    swap = tl.load(sin + half + dims, mask=inside, other=0.0).to(WIDE)[None, :]
    return turned, ((second * turn).to(dtype).to(WIDE) + first * swap).to(dtype)


@jit
def _rope_write(
    queries_keys, values, cos, sin, query_weight, key_weight, out, key_pool, value_pool, table, heads, kv_heads,
    query_eps, key_eps, row_stride, head_stride, value_row, value_head, key_pool_head, key_pool_slot, value_pool_head,
    value_pool_slot,
    SIZE: tl.constexpr, HALF_WIDTH: tl.constexpr, HEADS: tl.constexpr, NORMED: tl.constexpr, BY_TABLE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row, tile, dims = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HALF_WIDTH)
    half: tl.constexpr = SIZE // 2
    queries_keys += row * row_stride
    cos += row * SIZE
    sin += row * SIZE
    query_tiles = tl.cdiv(heads, HEADS)
    if tile < query_tiles:
        numbers = tile * HEADS + tl.arange(0, HEADS)
        found = _rotated(
            queries_keys, head_stride, numbers, numbers < heads, cos, sin, query_weight, query_eps, SIZE, HALF_WIDTH, NORMED, WIDE
        )
        mask = (numbers < heads)[:, None] & (dims < half)[None, :]
        places = out + (row * heads + numbers)[:, None] * SIZE + dims[None, :]
        tl.store(places, found[0], mask=mask)
        tl.store(places + half, found[1], mask=mask)
    else:
        numbers = (tile - query_tiles) * HEADS + tl.arange(0, HEADS)
        found = _rotated(
            queries_keys + heads * head_stride, head_stride, numbers, numbers < kv_heads, cos, sin, key_weight, key_eps,
            SIZE, HALF_WIDTH, NORMED, WIDE,
        )  # fmt: skip
        mask = (numbers < kv_heads)[:, None] & (dims < half)[None, :]
        slot = tl.load(table + row).to(tl.int64) if BY_TABLE else row
        of_head = numbers.to(tl.int64)[:, None]
        places = key_pool + of_head * key_pool_head + slot * key_pool_slot + dims[None, :]
        tl.store(places, found[0], mask=mask)
        tl.store(places + half, found[1], mask=mask)
        sources = values + row * value_row + numbers[:, None] * value_head + dims[None, :]
        places = value_pool + of_head * value_pool_head + slot * value_pool_slot + dims[None, :]
        tl.store(places, tl.load(sources, mask=mask, other=0.0), mask=mask)
        tl.store(places + half, tl.load(sources + half, mask=mask, other=0.0), mask=mask)
