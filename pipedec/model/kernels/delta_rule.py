"""The gated delta rule over prediction trees, for the rows of all requests, from the stashes of the pool by their numbers.

A first kernel normalises the rows' keys and queries, adds up their decays along their paths, and stashes what later rows need.
In the second one a program has some numbers of the values of one head of a request, whose rows it takes in order, a tile at a
time: a tile reads the states of its rows and all earlier rows in flight in products of matrices, and then its own, which are a
triangular system, one after the other. Where a request's tiles begin, and so the order of a row's sums, does not depend on other
requests.

Shape legend as in ``model.recurrent``; T rows of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.model.kernels import language
from pipedec.model.kernels.language import HAS_TRITON, jit, power_of_two, tl
from pipedec.model.kernels.short_convolution import in_flight, nearest_seen
from pipedec.model.recurrent import RuleInputs, TreeRows
from pipedec.model.row_tables import RowTables
from pipedec.model.states import LayerStates

_ROWS = 16  # of a tile
_VALUES = 32  # numbers of a value, of a program: 4 times 32 heads keep a GPU busy
_PART = 16  # numbers of a key that are multiplied together
_STEP = 32  # rows in flight that are read together
_NO_STATE = tl.constexpr(2**31 - 1) if HAS_TRITON else 0  # beyond every number of a state


def gated_delta_rule(
    queries_RJK: Tensor, keys_RJK: Tensor, values_RHV: Tensor, decays: Tensor, rates_RH: Tensor, tables: RowTables,
    memory: LayerStates,
) -> Tensor:  # fmt: skip
    """out_RHV, in the dtype of ``values_RHV``; zeros in rows of padding, and undefined in rows of chunks. The rows are stashed.

    Args:
        queries_RJK, keys_RJK: before they are normalised.
        decays: [R, H] or [R, H, K], logarithms.
        memory: of the layer, in float32.
    """
    rows, heads, width = values_RHV.shape
    key_heads, keys = keys_RJK.shape[1:]
    num_decays = memory.decays.shape[2]
    asking = keys_RJK.new_empty((2, rows, key_heads, keys), dtype=torch.float32)
    out_RHV = values_RHV.new_empty((rows, heads, width))
    key_width = power_of_two(keys)
    language.launch(
        _enter, (rows, heads), queries_RJK.contiguous(), keys_RJK.contiguous(), decays.contiguous(), asking, out_RHV,
        memory.keys, memory.decays, tables.table, tables.requests_of_rows, tables.flights, keys**-0.5, rows,
        HEADS=heads, KEY_HEADS=key_heads, KEY=keys, KEY_WIDTH=key_width, VALUE=width, VALUE_WIDTH=power_of_two(width),
        DECAYS=num_decays, DECAYS_WIDTH=1 << (num_decays - 1).bit_length(), STEP=_STEP,
    )  # fmt: skip
    values = min(_VALUES, power_of_two(width))
    language.launch(
        _rule, (len(tables.flights), heads, -(-width // values)), asking, values_RHV.contiguous(), rates_RH.contiguous(),
        out_RHV, memory.states, memory.keys, memory.updates, memory.decays, tables.table, tables.flights, tables.states, rows,
        HEADS=heads, KEY_HEADS=key_heads, KEY=keys, PART=_PART, VALUE=width, VALUES=values, ROWS=_ROWS, STEP=_STEP,
        PER_KEY=num_decays > 1, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out_RHV


def reference(
    queries_RJK: Tensor, keys_RJK: Tensor, values_RHV: Tensor, decays: Tensor, rates_RH: Tensor, tables: RowTables,
    memory: LayerStates,
) -> Tensor:  # fmt: skip
    """As ``gated_delta_rule``, in operations of torch that read no value on the host."""
    rows = RuleInputs.of(queries_RJK, keys_RJK, values_RHV, decays, rates_RH, memory.states.dtype)
    return TreeRows.of_tables(tables, len(memory.inputs)).mix(memory, rows).to(values_RHV.dtype)


@jit
def _enter(
    queries, keys, decays, asking, out, stashed_keys, stashed_decays, table, requests_of_rows, flights, scale, num_rows,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, DECAYS: tl.constexpr, DECAYS_WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One head of one row: its decays along its path; its key and its query, [2, R, J, K], keys first."""
    row, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(requests_of_rows + row)
    if request < 0:
        width = tl.arange(0, VALUE_WIDTH)
        tl.store(out + (row * HEADS + head) * VALUE + width, tl.zeros((VALUE_WIDTH,), out.dtype.element_ty), mask=width < VALUE)
        return
    rows, stashes, first_row, older, own, seen = in_flight(flights, request, row, table)
    if rows == 0:
        return
    stash = tl.load(table + stashes + older + own).to(tl.int64)
    each, nearest = tl.arange(0, DECAYS_WIDTH), nearest_seen(seen, older, STEP)
    before = tl.load(table + stashes + tl.maximum(nearest, 0)).to(tl.int64)
    is_before = each < tl.where(nearest >= 0, DECAYS, 0)
    total = tl.load(stashed_decays + (before * HEADS + head) * DECAYS + each, mask=is_before, other=0.0)
    for first in range(0, own + 1, STEP):
        columns = first + tl.arange(0, STEP)
        marks = tl.load(seen + older + columns, mask=columns <= own, other=0)
        places = ((first_row + columns) * HEADS + head) * DECAYS
        is_seen = (marks != 0)[:, None] & (each < DECAYS)[None, :]
        found = tl.load(decays + places[:, None] + each[None, :], mask=is_seen, other=0.0)
        total += tl.sum(found.to(tl.float32), 0)
    tl.store(stashed_decays + (stash * HEADS + head) * DECAYS + each, total, mask=each < DECAYS)
    if head % (HEADS // KEY_HEADS) == 0:
        dims = tl.arange(0, KEY_WIDTH)
        place = (row * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY + dims
        key = tl.load(keys + place, mask=dims < KEY, other=0.0).to(tl.float32)
        query = tl.load(queries + place, mask=dims < KEY, other=0.0).to(tl.float32)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        query = query * tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
        tl.store(asking + place, key, mask=dims < KEY)
        tl.store(asking + num_rows * KEY_HEADS * KEY + place, query, mask=dims < KEY)
        place = (stash * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY + dims
        tl.store(stashed_keys + place, key, mask=dims < KEY)


@jit
def _weights(
    asking, asking_places, asks, sums, sum_places, seen, stash, inside, head, stashed_keys, stashed_decays,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr,
    PER_KEY: tl.constexpr,
):  # fmt: skip
    """[2T, STEP], products of a tile's keys and queries with the keys of some rows in flight that they see, decayed."""
    key_places = (stash * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY
    decay_places = (stash * HEADS + head) * KEY if PER_KEY else stash * HEADS + head
    found = tl.zeros(seen.shape, tl.float32)
    for first in range(0, KEY, PART):
        dims = first + tl.arange(0, PART)
        is_dim = asks[:, None] & (dims < KEY)[None, :]
        asked = tl.load(asking + asking_places[:, None] + dims[None, :], mask=is_dim, other=0.0)
        if PER_KEY:
            numbers = tl.arange(0, STEP)
            own = tl.load(stashed_decays + sum_places[:, None] + dims[None, :], mask=is_dim, other=0.0)
            for number in range(STEP):
                is_one = numbers == number
                key_place, place = tl.sum(tl.where(is_one, key_places, 0), 0), tl.sum(tl.where(is_one, decay_places, 0), 0)
                width = tl.where(tl.sum(tl.where(is_one & inside, 1, 0), 0) > 0, KEY, 0)
                key = tl.load(stashed_keys + key_place + dims, mask=dims < width, other=0.0)
                before = tl.load(stashed_decays + place + dims, mask=dims < width, other=0.0)
                decayed = key[None, :] * tl.exp(tl.minimum(own - before[None, :], 0.0))
                found += tl.where(is_one[None, :] & seen, tl.sum(asked * decayed, 1)[:, None], 0.0)
        else:
            mask = inside[:, None] & (dims < KEY)[None, :]
            key = tl.load(stashed_keys + key_places[:, None] + dims[None, :], mask=mask, other=0.0)
            found = tl.dot(asked, tl.trans(key), found, input_precision="ieee")
    if not PER_KEY:
        before = tl.load(stashed_decays + decay_places, mask=inside, other=0.0)
        found *= tl.exp(tl.where(seen, sums[:, None] - before[None, :], float("-inf")))
    return found


@jit
def _halves(stacked, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[2T, …] of keys and queries as one tile each."""
    both, is_query = tl.reshape(stacked, (2, ROWS, WIDTH)), tl.arange(0, 2)[:, None, None]
    return tl.sum(tl.where(is_query == 0, both, 0.0), 0), tl.sum(tl.where(is_query == 1, both, 0.0), 0)


@jit
def _rule(
    asking, values, rates, out, states, stashed_keys, stashed_updates, stashed_decays, table, flights, states_of_rows, num_rows,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, PART: tl.constexpr, VALUE: tl.constexpr,
    VALUES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PER_KEY: tl.constexpr,
):  # fmt: skip
    """Some numbers of the values of one head, in all rows of one request."""
    request, head = tl.program_id(0), tl.program_id(1)
    entry = flights + request * 6
    rows = tl.load(entry + 3)
    if rows == 0:
        return
    stashes, first_row, seen_place, stride = tl.load(entry), tl.load(entry + 2), tl.load(entry + 4), tl.load(entry + 5)
    older = tl.load(entry + 1) - rows
    masks = table.to(tl.pointer_type(tl.uint8)) + seen_place
    width = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_tile, twice = tl.arange(0, ROWS), tl.arange(0, 2 * ROWS)
    for tile in range(0, rows, ROWS):
        own = tile + in_tile
        own_ok, asking_rows = own < rows, tile + twice % ROWS  # each row asks with its key and then with its query
        asks = asking_rows < rows
        states_asked = tl.load(states_of_rows + first_row + asking_rows, mask=asks, other=_NO_STATE)
        asking_places = ((twice // ROWS * num_rows + first_row + asking_rows) * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY
        asking_stash = tl.load(table + stashes + older + asking_rows, mask=asks, other=0).to(tl.int64)
        sum_places = (asking_stash * HEADS + head) * KEY if PER_KEY else asking_stash * HEADS + head
        sums = tl.load(stashed_decays + sum_places, mask=asks, other=0.0)  # with a decay for each number of a key, the first ones
        read = tl.zeros((2 * ROWS, VALUES), tl.float32)
        state = tl.min(states_asked, 0)
        while state < _NO_STATE:  # each state of the tile's rows
            product = tl.zeros((2 * ROWS, VALUES), tl.float32)
            for first in range(0, KEY, PART):
                dims = first + tl.arange(0, PART)
                is_dim = asks[:, None] & (dims < KEY)[None, :]
                asked = tl.load(asking + asking_places[:, None] + dims[None, :], mask=is_dim, other=0.0)
                if PER_KEY:
                    asked *= tl.exp(tl.load(stashed_decays + sum_places[:, None] + dims[None, :], mask=is_dim, other=0.0))
                else:
                    asked *= tl.exp(sums)[:, None]
                of_keys = ((state.to(tl.int64) * HEADS + head) * KEY + dims) * VALUE
                is_number = (dims < KEY)[:, None] & (width < VALUE)[None, :]
                past = tl.load(states + of_keys[:, None] + width[None, :], mask=is_number, other=0.0)
                product = tl.dot(asked, past, product, input_precision="ieee")
            read = tl.where((states_asked == state)[:, None], product, read)
            state = tl.min(tl.where(states_asked > state, states_asked, _NO_STATE), 0)
        for first in range(0, older + tile, STEP):
            numbers = first + tl.arange(0, STEP)
            inside = numbers < older + tile
            stash = tl.load(table + stashes + numbers, mask=inside, other=0).to(tl.int64)
            is_seen = asks[:, None] & inside[None, :]
            marks = tl.load(masks + asking_rows[:, None] * stride + numbers[None, :], mask=is_seen, other=0)
            weights = _weights(
                asking, asking_places, asks, sums, sum_places, marks != 0, stash, inside, head, stashed_keys, stashed_decays,
                HEADS, KEY_HEADS, KEY, PART, STEP, PER_KEY,
            )  # fmt: skip
            of_stash, is_number = (stash * HEADS + head) * VALUE, inside[:, None] & (width < VALUE)[None, :]
            before = tl.load(stashed_updates + of_stash[:, None] + width[None, :], mask=is_number, other=0.0)
            read += tl.dot(weights, before, input_precision="ieee")
        numbers = older + own
        own_stash = tl.load(table + stashes + numbers, mask=own_ok, other=0).to(tl.int64)
        marks = tl.load(masks + asking_rows[:, None] * stride + numbers[None, :], mask=asks[:, None] & own_ok[None, :], other=0)
        weights = _weights(
            asking, asking_places, asks, sums, sum_places, marks != 0, own_stash, own_ok, head, stashed_keys, stashed_decays,
            HEADS, KEY_HEADS, KEY, PART, ROWS, PER_KEY,
        )  # fmt: skip
        by_keys, by_queries = _halves(weights, ROWS, ROWS)
        found, answered = _halves(read, ROWS, VALUES)
        rate = tl.load(rates + (first_row + own) * HEADS + head, mask=own_ok, other=0.0).to(tl.float32)
        place = ((first_row + own) * HEADS + head).to(tl.int64) * VALUE
        mask = own_ok[:, None] & (width < VALUE)[None, :]
        value = tl.load(values + place[:, None] + width[None, :], mask=mask, other=0.0).to(tl.float32)
        updates = rate[:, None] * (value - found)
        earlier = tl.trans(tl.where(in_tile[None, :] < in_tile[:, None], rate[:, None] * by_keys, 0.0))  # [earlier, row]
        for row in range(1, ROWS):  # rows before it are complete
            of_row = tl.sum(tl.where(in_tile[None, :] == row, earlier, 0.0), 1)
            less = tl.sum(of_row[:, None] * updates, 0)
            updates = tl.where(in_tile[:, None] == row, updates - less[None, :], updates)
        answered += tl.dot(by_queries, updates, input_precision="ieee")
        tl.store(out + place[:, None] + width[None, :], answered.to(out.dtype.element_ty), mask=mask)
        place = (own_stash * HEADS + head) * VALUE
        tl.store(stashed_updates + place[:, None] + width[None, :], updates, mask=mask)
        tl.debug_barrier()  # the next tile reads them
