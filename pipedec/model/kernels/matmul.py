"""Products with weights as they are stored, of one matrix or of the experts of a layer, in one skeleton for all kinds of storage.

A program widens tiles of weights in registers, in float32, rounds them to the type of the activations, and multiplies: a product
is that with the widened weights up to the order of its sums. Weights are the longer side of each tile of products, so that few
rows fill it. Inputs are added up in an order that depends on the weights alone: a row's product is the same in any company.

A kind of storage is a function that widens, such as ``affine.widen``:

    widen(codes, scales, extra, table, outputs, is_output, first, part, K, GROUP, GROUPS, KIND, BK) -> float32 [BN, BK]

It returns the weights of ``outputs``, int64 [BN], and of the inputs of part ``part`` from place ``first`` on; where an output is
none of the matrix or a place is beyond the part, anything finite. See ``Weights`` for what it gets.

Shape legend: P rows, N outputs, K inputs, X experts, T tiles of rows; BN outputs, BK inputs of a part and BR rows of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipedec.core.limits import KERNEL_ROWS
from pipedec.model.kernels import language
from pipedec.model.kernels.language import jit, tl

_STAGE_BYTES = 80 * 1024  # of a multiprocessor's memory, for what is under way: programs take 99 KiB at most
_MANY_OUTPUTS = 8192  # that are enough programs for every GPU, in tiles of 64


@dataclass(frozen=True)
class Weights:
    """Weights [N, K] of a matrix as they are stored, or [X, N, K] of the experts of a layer.

    Attributes:
        shape: (N, K).
        widen: the function of the kind of storage.
        buffers: what it reads: codes, scales, something else per output, and a table that all outputs share. All but the codes
            may be None. The lengths of their rows follow from ``shape``.
        strides: numbers of each buffer from one expert to the next.
        parts: in which the inputs are widened: input ``part · K / parts + place``, or ``2 · place + part`` if ``is_woven``.
        is_woven: whether consecutive inputs are of different parts, of which there are two.
        group: consecutive inputs that share a scale; 0 for all of an output.
        is_gathered: whether the group of each input has to be looked up, as where a table orders inputs.
        kind: a number or word that the function knows.
    """

    shape: tuple[int, int]
    widen: Any
    buffers: Sequence[Tensor | None]
    strides: Sequence[int] = (0, 0, 0, 0)
    parts: int = 1
    is_woven: bool = False
    group: int = 0
    is_gathered: bool = False
    kind: Any = None

    def of_experts(self, experts: int) -> Weights:
        """The weights of so many experts one below the other, as those of a layer of experts that share the table."""
        outputs, inputs = self.shape
        sizes = [0 if buffer is None else buffer.numel() // experts for buffer in self.buffers[:3]]
        return replace(self, shape=(outputs // experts, inputs), strides=(*sizes, 0))


def matmul(rows_PK: Tensor, weights: Weights, bias_N: Tensor | None = None) -> Tensor:
    """rows · weightsᵀ (+ bias), [P, N], in the type of the rows."""
    return _multiplied(rows_PK, weights, bias_N, None, rows_of_tile(len(rows_PK)))


def grouped_matmul(
    rows_PK: Tensor, weights: Weights, tiles_T3: Tensor, tile_rows: int, biases_XN: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Rows in the order of their experts by the weights of those experts (+ bias), [P, N]. Rows of no tile have no values.

    Args:
        tiles_T3: int32: the expert of each tile, or -1 for a tile of nothing; its first row; its number of rows.
        tile_rows: that number at the most; 16, 32 or 64. It changes no bit of the product.
    """
    return _multiplied(rows_PK, weights, biases_XN, tiles_T3, tile_rows)


def rows_of_tile(rows: int) -> int:
    """Rows of a tile for so many rows of one matrix."""
    return 16 if rows <= 16 else 32 if rows <= 32 else KERNEL_ROWS


def reference(rows_PK: Tensor, weights_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """As ``matmul``, with widened weights."""
    return torch.nn.functional.linear(rows_PK, weights_NK.to(rows_PK.dtype), bias_N)


def plain_weights(weight_NK: Tensor) -> Weights:
    """Weights that are numbers already."""
    outputs, inputs = weight_NK.shape
    return Weights((outputs, inputs), plain, (weight_NK, None, None, None))


def _multiplied(rows_PK: Tensor, weights: Weights, bias: Tensor | None, tiles_T3: Tensor | None, tile_rows: int) -> Tensor:
    (num_rows, _), (outputs, inputs) = rows_PK.shape, weights.shape
    is_exact = rows_PK.dtype == torch.float32
    out_PN = rows_PK.new_empty((num_rows, outputs))
    block_outputs, step = _tile(weights, is_exact)
    if rows_PK.stride(1) != 1:
        rows_PK = rows_PK.contiguous()
    stage_bytes = step * weights.parts * (2 * tile_rows + block_outputs // 2)  # rows and codes of every part
    num_stages = 2 if is_exact else min(max(_STAGE_BYTES // stage_bytes, 2), 4)
    num_tiles = -(-num_rows // tile_rows) if tiles_T3 is None else len(tiles_T3)
    language.launch(
        _multiply, (num_tiles, -(-outputs // block_outputs)), rows_PK, out_PN, bias, tiles_T3, *weights.buffers, *weights.strides,
        num_rows, outputs, rows_PK.stride(0),
        WIDEN=weights.widen, KIND=weights.kind, K=inputs, PARTS=weights.parts, WOVEN=weights.is_woven,
        GROUP=weights.group or inputs, GROUPS=_groups(weights, step), BN=block_outputs, BK=step, BR=tile_rows, EXACT=is_exact,
        num_warps=8 if tile_rows == KERNEL_ROWS and (weights.is_woven or step > 64) else 4, num_stages=num_stages,
    )  # fmt: skip
    return out_PN


def _tile(weights: Weights, is_exact: bool) -> tuple[int, int]:
    """Outputs of a program, and inputs of each part in a step. Both depend on the weights alone: where outputs are few, each
    program has longer pieces of them under way.
    """
    outputs, inputs = weights.shape
    block, step = (32, 32) if is_exact else (64, 64) if outputs >= _MANY_OUTPUTS else (32, 128)
    most = 32 if weights.parts > 2 else 64 if weights.is_woven else step  # registers hold no more
    return block, min(most, step, language.power_of_two(inputs // weights.parts))


def _groups(weights: Weights, step: int) -> int:
    """The number of groups of the inputs of a step in each part, where it is the same for all steps; the step itself where the
    group of each input is looked up.
    """
    inputs, woven = weights.shape[1], weights.parts if weights.is_woven else 1
    run, offset = (weights.group or inputs) // woven, 0 if weights.is_woven or weights.parts == 1 else inputs // weights.parts
    if weights.is_gathered:
        return step
    if run * woven >= inputs or (run % step == 0 and offset % step == 0):
        return 1
    return step // run if step % run == 0 and offset % run == 0 else step


@jit
def plain(
    codes, scales, extra, table, outputs, is_output, first, part: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Numbers [N, K] as they are; ``codes``."""
    places = first + tl.arange(0, BK)
    mask = is_output[:, None] & (places < K)[None, :]
    return tl.load(codes + outputs[:, None] * K + places[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def group_numbers(
    first, part: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, WOVEN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The numbers of the groups of a step, int32 [GROUPS]."""
    STRIDE: tl.constexpr = PARTS if WOVEN else 1
    OFFSET: tl.constexpr = part if WOVEN else part * (K // PARTS)
    return (first * STRIDE + OFFSET + tl.arange(0, GROUPS) * (BK * STRIDE // GROUPS)) // GROUP


@jit
def as_float(code, zero):
    """code − zero, float32, of integers from 0 to 2^23 − 1, by operations on bits: GPUs convert few integers per clock."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)


@jit
def spread(values, GROUPS: tl.constexpr, BK: tl.constexpr):
    """[BN, GROUPS] repeated for the inputs of each group, [BN, BK]; [BN, 1] for one group."""
    if GROUPS == 1 or GROUPS == BK:
        return values
    else:
        return tl.reshape(tl.broadcast_to(values[:, :, None], (values.shape[0], GROUPS, BK // GROUPS)), (values.shape[0], BK))


@jit
def _multiply(
    rows, out, biases, tiles, codes, scales, extra, table, codes_step, scales_step, extra_step, table_step,
    num_rows, num_outputs, row_stride,
    WIDEN: tl.constexpr, KIND: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, WOVEN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The product of a tile of rows and a tile of outputs."""
    tile = tl.program_id(0)
    expert = tile * 0
    row, count = tile * BR, tl.minimum(num_rows - tile * BR, BR)
    if tiles is not None:
        expert, row, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if expert < 0:
        return
    codes += expert.to(tl.int64) * codes_step
    if scales is not None:
        scales += expert.to(tl.int64) * scales_step
    if extra is not None:
        extra += expert.to(tl.int64) * extra_step
    if table is not None:
        table += expert.to(tl.int64) * table_step
    outputs = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    is_output = outputs < num_outputs
    rows_r = row.to(tl.int64) + tl.arange(0, BR)
    is_row = tl.arange(0, BR) < count
    SPAN: tl.constexpr = K // PARTS
    if WOVEN:
        BITS: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth
        HALF: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
        pairs_of_rows = rows.to(tl.pointer_type(tl.int32 if BITS == 16 else tl.int64))
    sums = tl.zeros((BN, BR), tl.float32)
    for first in range(0, SPAN, BK):
        for part in tl.static_range(PARTS):
            wide = WIDEN(codes, scales, extra, table, outputs, is_output, first, part, K, GROUP, GROUPS, KIND, BK)
            places = first + tl.arange(0, BK)
            mask = is_row[None, :] & (places < SPAN)[:, None]
            if WOVEN:  # both of a pair are read at once
                pairs = tl.load(pairs_of_rows + rows_r[None, :] * (row_stride // 2) + places[:, None], mask=mask, other=0)
                found = (pairs >> part * BITS).to(HALF).to(rows.dtype.element_ty, bitcast=True)
            else:
                found = tl.load(rows + rows_r[None, :] * row_stride + (places + part * SPAN)[:, None], mask=mask, other=0.0)
            sums = tl.dot(wide.to(found.dtype), found, sums, input_precision="ieee" if EXACT else None)
    if biases is not None:
        sums += tl.load(biases + expert.to(tl.int64) * num_outputs + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    mask = is_output[:, None] & is_row[None, :]
    tl.store(out + rows_r[None, :] * num_outputs + outputs[:, None], sums.to(out.dtype.element_ty), mask=mask)
