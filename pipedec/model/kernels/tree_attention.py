"""Attention of the rows of all requests over their pasts and prediction trees, in the pool's blocks, without copies.

The blocks of a request's slots are dealt to a fixed number of *splits* by their number in the cache: split s attends to blocks s,
s + SPLITS, … So the order in which a row's sums are taken depends on its own past alone, not on the longest past of the forward
nor on other requests, and one launch serves every length. A second kernel adds up the splits (arXiv 2205.14135, with the
splits of Flash-Decoding). Queries of the heads that share a key-value head are rows of one tile.

Shape legend as in ``model.attention``; M queries of a tile, B slots of a step, X splits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.families import LayerShape, Reach
from pipedec.model.kernels import language
from pipedec.model.kernels.language import HAS_TRITON, jit, power_of_two, tl
from pipedec.model.row_tables import BY_NUMBER, CAUSAL, RowTables

_QUERIES = 64  # of a tile at most: what tensor cores compute while a step's keys and values arrive
_TOKENS = 8  # of a tile, if so many queries are not too many
_STEP = 32  # slots; half as many of float32: three steps fit into the memory of a 3090's SM, and no register is spilled
_NO_SLOT = tl.constexpr(2**31 - 1) if HAS_TRITON else 0  # beyond every number of a slot


def tile_tokens(shape: LayerShape, dtype: torch.dtype) -> int:
    """Rows of one request in a tile of a layer. Depends on the model alone; in float32 registers hold fewer."""
    group = 1 << (shape.group - 1).bit_length()
    most = _QUERIES if dtype.itemsize == 2 else 16
    return max(16, min(most, _TOKENS * group)) // group


def paged_attention(
    q_RHD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, tables: RowTables, positions_R: Tensor, shape: LayerShape, block: int,
    prompt: range = range(0), sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out_RHD; zeros in rows of padding.

    Args:
        q_RHD: rotated queries.
        keys_KSD, values_KSD: all of a layer in the pool, the rows' own included.
        positions_R: int64 position ids of the rows.
        block: slots of the pool's blocks.
        prompt: the pool's slots of the learned prompt, which mask rows see before all others.
        sinks_H: see ``RowAttention.attend``.
    """
    rows, heads, _ = q_RHD.shape
    tokens, splits, reach = tile_tokens(shape, q_RHD.dtype), shape.num_splits, shape.reach
    tiles, width = tables.tiles[tokens], shape.value_dim
    is_exact = q_RHD.dtype == torch.float32
    partial = q_RHD.new_empty((rows, heads, splits, width), dtype=torch.float32)
    tops_totals = q_RHD.new_empty((2, rows, heads, splits), dtype=torch.float32)
    out_RHD = q_RHD.new_empty((rows, heads, width))
    group = 1 << (shape.group - 1).bit_length()
    language.launch(
        _attend, (len(tiles), shape.num_kv_heads, splits),
        q_RHD, keys_KSD, values_KSD, partial, tops_totals[0], tops_totals[1], tables.table, tiles, tables.requests, positions_R,
        q_RHD.stride(0), q_RHD.stride(1), keys_KSD.stride(0), keys_KSD.stride(1), values_KSD.stride(0), values_KSD.stride(1),
        shape.key_dim**-0.5 if shape.scale is None else shape.scale, shape.softcap or 1.0, heads, prompt.start, len(prompt),
        GROUP=shape.group, GROUP_WIDTH=group, KEY=shape.key_dim, VALUE=width, KEY_WIDTH=power_of_two(shape.key_dim),
        VALUE_WIDTH=power_of_two(width), BLOCK=block, STEP=_STEP // 2 if is_exact else _STEP, SPLITS=splits,
        QUERIES=tokens * group, REACH=0 if reach is None else reach.size, IN_CHUNKS=reach is not None and reach.is_chunk,
        CAPPED=shape.softcap is not None, PROMPT=len(prompt) > 0, EXACT=is_exact,
        num_warps=8 if is_exact and width > 128 else 4, num_stages=1 if is_exact else 3,
    )  # fmt: skip
    language.launch(
        _merge, (rows, heads),
        partial, tops_totals[0], tops_totals[1], q_RHD if sinks_H is None else sinks_H, out_RHD, tables.num_rows,
        VALUE=width, VALUE_WIDTH=power_of_two(width), SPLITS=splits, SINKS=sinks_H is not None,
    )  # fmt: skip
    return out_RHD


def visible_slots(
    tables: RowTables, positions_R: Tensor, reach: Reach | None, block: int, num_slots: int, prompt: range = range(0)
) -> Tensor:
    """Which of a pool's ``num_slots`` each row attends to, bool [R, num_slots], in operations of torch that read no value on the
    host. Arguments as of ``paged_attention``.
    """
    rows, device = tables.rows, positions_R.device
    is_row_R1 = (tables.requests_of_rows >= 0)[:, None]
    requests_R8 = tables.requests[tables.requests_of_rows.clamp(min=0).long()].long()
    length, shared, row, mask_row, blocks, seen, stride, place = (field[:, None] for field in requests_R8.unbind(1))
    numbers_S = torch.arange(num_slots, device=device)
    column_RS, own_R1 = numbers_S - shared, torch.arange(rows, device=device)[:, None] - row
    table, masks = tables.table, tables.table.view(torch.uint8)

    def read(memory: Tensor, places_RS: Tensor) -> Tensor:
        return memory[places_RS.clamp(0, len(memory) - 1)].long()

    in_mask_RS = read(masks, seen + own_R1 * stride + column_RS) > 0
    in_mask_RS = torch.where(stride == CAUSAL, column_RS <= own_R1, in_mask_RS)
    visible_RS = (numbers_S < length) & ((column_RS < 0) | in_mask_RS) & is_row_R1
    if reach is not None:
        is_named = (column_RS >= 0) & (place != BY_NUMBER)
        where_RS = torch.where(is_named, read(table, place + column_RS), numbers_S)
        visible_RS &= reach.includes(positions_R[:, None], where_RS)
    slots_RS = read(table, blocks + numbers_S // block) * block + numbers_S % block
    found_RS = torch.zeros(rows, num_slots + 1, dtype=torch.bool, device=device)  # the last is no slot
    found_RS = found_RS.scatter(1, torch.where(visible_RS, slots_RS, num_slots), True)[:, :num_slots]
    if len(prompt):
        found_RS[:, prompt.start : prompt.stop] |= is_row_R1 & (own_R1 + row >= mask_row)
    return found_RS


def reference(
    q_RHD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, visible_RS: Tensor, shape: LayerShape, sinks_H: Tensor | None = None
) -> Tensor:
    """As ``paged_attention``. Each row's scores with the whole pool are computed, and masked by ``visible_slots``."""
    rows, kv_heads, exact = len(q_RHD), len(keys_KSD), torch.promote_types(q_RHD.dtype, torch.float32)
    is_finite_S = values_KSD.isfinite().all(2).all(0)  # NaN, of memory that was never written, too, is of those alone who see it
    sees_nan_R = (visible_RS & ~is_finite_S).any(1)
    values_KSD = values_KSD.masked_fill(~is_finite_S[:, None], 0).to(exact)
    queries = q_RHD.view(rows, kv_heads, -1, q_RHD.shape[2]).to(exact)
    scores = torch.einsum("rkgd,ksd->rkgs", queries, keys_KSD.to(exact))
    scores = scores * (shape.key_dim**-0.5 if shape.scale is None else shape.scale)
    if shape.softcap is not None:
        scores = (scores / shape.softcap).tanh() * shape.softcap
    scores = scores.masked_fill(~visible_RS[:, None, None], -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(exact).view(1, kv_heads, -1, 1).expand(rows, -1, -1, -1)
        scores = torch.cat((scores, sinks), 3)
    weights = scores.softmax(3)[..., : keys_KSD.shape[1]].masked_fill(~visible_RS[:, None, None], 0)
    out_RHD = torch.einsum("rkgs,ksd->rkgd", weights, values_KSD).flatten(1, 2).to(q_RHD.dtype)
    return out_RHD.masked_fill(sees_nan_R[:, None, None], torch.nan)


@jit
def _step(
    asked, out, top, total, slots, inside, visible, keys, values, key_slot, value_slot, scale, cap,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to some slots, of which some are ``inside`` the cache and ``visible``: the new out, top and total."""
    key_dims, value_dims = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    found = tl.load(
        keys + slots[:, None] * key_slot + key_dims[None, :], mask=inside[:, None] & (key_dims < KEY)[None, :], other=0.0
    )
    scores = tl.dot(asked, tl.trans(found), input_precision="ieee" if EXACT else None) * scale
    if CAPPED:
        shrunk = tl.exp(-2 * tl.abs(scores / cap))
        size = (1 - shrunk) / (1 + shrunk) * cap
        scores = tl.where(scores < 0, -size, size)
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)  # of rows that have seen no slot yet
    weights, before = tl.exp(scores - finite[:, None]), tl.exp(top - finite)
    found = tl.load(
        values + slots[:, None] * value_slot + value_dims[None, :],
        mask=inside[:, None] & (value_dims < VALUE)[None, :],
        other=0.0,
    )
    out = out * before[:, None] + tl.dot(weights.to(found.dtype), found, input_precision="ieee" if EXACT else None)
    return out, highest, total * before + tl.sum(weights, 1)


@jit
def _numbered(
    first, row_positions, rows_ok, own, length, shared, place, seen, stride, table, blocks,
    BLOCK: tl.constexpr, STEP: tl.constexpr, REACH: tl.constexpr, IN_CHUNKS: tl.constexpr, IN_MASK: tl.constexpr,
):  # fmt: skip
    """Slots from number ``first`` on: where they are in the pool, which are in the cache, and which the queries see."""
    numbers = first + tl.arange(0, STEP)
    inside = numbers < length
    slots = tl.load(table + blocks + numbers // BLOCK, mask=inside, other=0).to(tl.int64) * BLOCK + numbers % BLOCK
    visible = rows_ok[:, None] & inside[None, :]
    column = numbers - shared
    if IN_MASK:  # a scalar chooses by where it puts a bound: without masks no column is in one, with them none is causal
        in_mask = visible & (column >= tl.where(stride > 0, 0, _NO_SLOT))[None, :]
        masks = table.to(tl.pointer_type(tl.uint8)) + seen
        masked = tl.load(masks + own[:, None] * stride + column[None, :], mask=in_mask, other=1)
        visible = visible & (masked != 0) & (column[None, :] <= (own + tl.where(stride > 0, _NO_SLOT // 2, 0))[:, None])
    if REACH > 0:
        where = numbers
        if IN_MASK:
            named = inside & (column >= tl.where(place >= 0, 0, _NO_SLOT))
            where = tl.where(named, tl.load(table + place + column, mask=named, other=0), numbers)
        if IN_CHUNKS:
            visible = visible & (where[None, :] // REACH == row_positions[:, None] // REACH)
        else:
            visible = visible & (where[None, :] > row_positions[:, None] - REACH)
    return slots, inside, visible


@jit
def _attend(
    q, keys, values, partial, tops, totals, table, tiles, requests, positions,
    q_row, q_head, key_head, key_slot, value_head, value_slot, scale, cap, heads, prompt, num_prompt,
    GROUP: tl.constexpr, GROUP_WIDTH: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, QUERIES: tl.constexpr,
    REACH: tl.constexpr, IN_CHUNKS: tl.constexpr, CAPPED: tl.constexpr, PROMPT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one key-value head over one split: their weighted values, highest score, and sum of weights."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = tl.load(tiles + tile * 3)
    if request < 0:
        return
    row, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    entry = requests + request * 8
    length, shared, first_row, mask_row = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    blocks, seen, stride, place = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    queries, dims = tl.arange(0, QUERIES), tl.arange(0, KEY_WIDTH)
    token, member = queries // GROUP_WIDTH, queries % GROUP_WIDTH
    rows_ok = (token < count) & (member < GROUP)
    rows, of_head = row + token, head * GROUP + member
    own = rows - first_row
    asked = tl.load(
        q + rows[:, None] * q_row + of_head[:, None] * q_head + dims[None, :], mask=rows_ok[:, None] & (dims < KEY)[None, :],
        other=0.0,
    )  # fmt: skip
    row_positions = own
    if REACH > 0:
        row_positions = tl.load(positions + rows, mask=rows_ok, other=0).to(tl.int32)
    keys += head.to(tl.int64) * key_head
    values += head.to(tl.int64) * value_head
    out = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    if PROMPT:
        if split == 0 and row + count > mask_row:
            for first in range(0, num_prompt, STEP):
                numbers = first + tl.arange(0, STEP)
                inside = numbers < num_prompt
                visible = (rows_ok & (rows >= mask_row))[:, None] & inside[None, :]
                out, top, total = _step(
                    asked, out, top, total, (prompt + numbers).to(tl.int64), inside, visible, keys, values, key_slot,
                    value_slot, scale, cap, KEY, VALUE, KEY_WIDTH, VALUE_WIDTH, CAPPED, EXACT,
                )  # fmt: skip
    whole = shared // STEP  # steps over slots that all rows see
    begin = 0
    if REACH > 0:  # steps that no row reaches are left out
        lowest = tl.min(tl.where(rows_ok, row_positions, _NO_SLOT), 0)
        begin = lowest // REACH * REACH if IN_CHUNKS else tl.maximum(lowest - REACH + 1, 0)
        begin = tl.minimum(begin // STEP, whole)
    for in_mask in tl.static_range(2):  # steps without masks, then those with them
        first, end = (whole, tl.cdiv(length, STEP)) if in_mask else (begin, whole)
        for step in range(first + (split - first % SPLITS + SPLITS) % SPLITS, end, SPLITS):
            slots, inside, visible = _numbered(
                step * STEP, row_positions, rows_ok, own, length, shared, place, seen, stride, table, blocks,
                BLOCK, STEP, REACH, IN_CHUNKS, in_mask,
            )  # fmt: skip
            out, top, total = _step(
                asked, out, top, total, slots, inside, visible, keys, values, key_slot, value_slot, scale, cap,
                KEY, VALUE, KEY_WIDTH, VALUE_WIDTH, CAPPED, EXACT,
            )  # fmt: skip
    places, width = (rows * heads + of_head) * SPLITS + split, tl.arange(0, VALUE_WIDTH)
    tl.store(tops + places, top, mask=rows_ok)
    tl.store(totals + places, total, mask=rows_ok)
    mask = (rows_ok & (total != 0))[:, None] & (width < VALUE)[None, :]
    tl.store(partial + places[:, None] * VALUE + width[None, :], out, mask=mask)


@jit
def _merge(
    partial, tops, totals, sinks, out, num_rows,
    VALUE: tl.constexpr, VALUE_WIDTH: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The sum of one query over the splits, each by its share of all weights."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    splits, width = tl.arange(0, SPLITS), tl.arange(0, VALUE_WIDTH)
    places = (row * heads + head) * SPLITS + splits
    is_row = splits < tl.where(row < tl.load(num_rows), SPLITS, 0)
    top = tl.load(tops + places, mask=is_row, other=float("-inf"))
    total = tl.load(totals + places, mask=is_row, other=0.0)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    shares = tl.exp(top - highest)
    whole = tl.sum(shares * total, 0)
    if SINKS:
        whole += tl.exp(sink - highest)
    mask = (total != 0)[:, None] & (width < VALUE)[None, :]
    found = tl.load(partial + places[:, None] * VALUE + width[None, :], mask=mask, other=0.0)
    found = tl.sum(found * shares[:, None], 0) / tl.where(whole != 0, whole, 1.0)
    tl.store(out + (row * heads + head) * VALUE + width, found.to(out.dtype.element_ty), mask=width < VALUE)
