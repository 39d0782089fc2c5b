"""The short convolution of recurrent layers along each row's path, whose tokens are in flight or in the past.

Shape legend as in ``model.recurrent``.
"""

from __future__ import annotations

from torch import Tensor

from pipedec.model.kernels import language
from pipedec.model.kernels.language import jit, power_of_two, tl
from pipedec.model.recurrent import TreeRows
from pipedec.model.row_tables import RowTables
from pipedec.model.states import LayerStates

_CHANNELS = 1024  # of a program
_COLUMNS = 1024  # rows in flight that are looked at together


def short_convolution(
    inputs_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tables: RowTables, memory: LayerStates
) -> Tensor:
    """[R, C], before the activation; zeros in rows of padding, and undefined in rows of chunks. The rows' inputs are stashed.

    Args:
        memory: of the layer.
    """
    rows, channels = inputs_RC.shape
    inputs_RC, weight_CW = inputs_RC.contiguous(), weight_CW.contiguous()
    out_RC = inputs_RC.new_empty((rows, channels))
    width = min(_CHANNELS, power_of_two(channels))
    language.launch(
        _convolve, (rows, -(-channels // width)), inputs_RC, weight_CW, weight_CW if bias_C is None else bias_C, out_RC,
        memory.inputs, memory.past_inputs, tables.table, tables.requests_of_rows, tables.flights, tables.states, channels,
        KERNEL=weight_CW.shape[1], BIAS=bias_C is not None, CHANNELS=width, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out_RC


def reference(inputs_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tables: RowTables, memory: LayerStates) -> Tensor:
    """As ``short_convolution``, in operations of torch that read no value on the host."""
    return TreeRows.of_tables(tables, len(memory.inputs)).convolve(memory, inputs_RC, weight_CW, bias_C)


@jit
def in_flight(flights, request, row, table):
    """The ``FlightEntry`` of a row's request: the number of its rows that enter, the place of the stashes, and the first row; the
    number of rows in flight that are older; and of the row its number among those that enter, and its mask.
    """
    entry = flights + request * 6
    rows, stashes, first_row = tl.load(entry + 3), tl.load(entry), tl.load(entry + 2)
    own = row - first_row
    seen = table.to(tl.pointer_type(tl.uint8)) + tl.load(entry + 4) + own * tl.load(entry + 5)
    return rows, stashes, first_row, tl.load(entry + 1) - rows, own, seen


@jit
def nearest_seen(seen, end, COLUMNS: tl.constexpr):
    """The last row in flight before number ``end`` that a mask sees; -1 if there is none."""
    nearest = -1
    for first in range(0, end, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        marks = tl.load(seen + columns, mask=columns < end, other=0)
        nearest = tl.maximum(nearest, tl.max(tl.where(marks != 0, columns, -1), 0))
    return nearest


@jit
def _convolve(
    inputs, weights, bias, out, stashed, past, table, requests_of_rows, flights, states, channels,
    KERNEL: tl.constexpr, BIAS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some channels of one row."""
    row = tl.program_id(0)
    places = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    request = tl.load(requests_of_rows + row)
    if request < 0:
        tl.store(out + row.to(tl.int64) * channels + places, tl.zeros((CHANNELS,), out.dtype.element_ty), mask=places < channels)
        return
    rows, stashes, first_row, older, own, seen = in_flight(flights, request, row, table)
    if rows == 0:
        return
    state = tl.load(states + row).to(tl.int64)
    entered = tl.load(inputs + row.to(tl.int64) * channels + places, mask=places < channels, other=0.0)
    stash = tl.load(table + stashes + older + own).to(tl.int64)
    tl.store(stashed + stash * channels + places, entered, mask=places < channels)
    weight = tl.load(weights + places * KERNEL + KERNEL - 1, mask=places < channels, other=0.0)
    total = entered.to(tl.float32) * weight.to(tl.float32)
    column, missing = older + own, 0  # the last token found, and how many of those before it were sought in the past
    for back in tl.static_range(1, KERNEL):
        nearest = nearest_seen(seen, column, COLUMNS)
        missing += tl.where(nearest < 0, 1, 0)
        stash = tl.load(table + stashes + tl.maximum(nearest, 0)).to(tl.int64)
        entering = (first_row + nearest - older).to(tl.int64)
        is_entering = places < tl.where(nearest >= older, channels, 0)
        is_stashed = places < tl.where((nearest >= 0) & (nearest < older), channels, 0)
        is_past = places < tl.where(nearest < 0, channels, 0)
        before = (state * (KERNEL - 1) + KERNEL - 1 - missing) * channels
        token = tl.load(inputs + entering * channels + places, mask=is_entering, other=0.0).to(tl.float32)
        token += tl.load(stashed + stash * channels + places, mask=is_stashed, other=0.0).to(tl.float32)
        token += tl.load(past + before + places, mask=is_past, other=0.0).to(tl.float32)
        weight = tl.load(weights + places * KERNEL + KERNEL - 1 - back, mask=places < channels, other=0.0)
        total += token * weight.to(tl.float32)
        column = tl.maximum(nearest, 0)
    if BIAS:
        total += tl.load(bias + places, mask=places < channels, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * channels + places, total.to(out.dtype.element_ty), mask=places < channels)
