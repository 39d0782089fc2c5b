"""Products with 4-bit numbers that are places in a table: MXFP4, and the NF4 and FP4 of bitsandbytes.

Shape legend as in ``matmul``; G groups of inputs, P scales of the scales of an output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.model.kernels.float8 import from_exponent
from pipedec.model.kernels.language import jit, tl
from pipedec.model.kernels.matmul import Weights, group_numbers, spread

_MXFP4 = -1


def mxfp4_weights(codes: Tensor, exponents_NG: Tensor, group: int) -> Weights:
    """E2M1 · 2^(exponent − 127).

    Args:
        codes: uint8 [N, K / 2], an input in the lower bits and the next one in the upper ones.
        exponents_NG: uint8.
    """
    shape = len(codes), 2 * codes.shape[1]
    return Weights(shape, widen, (codes, exponents_NG, None, None), parts=2, is_woven=True, group=group, kind=_MXFP4)


def table_weights(
    codes: Tensor, scales_NG: Tensor, group: int, table: Tensor, nested: Tensor | None = None, starts_N: Tensor | None = None
) -> Weights:  # fmt: skip
    """table[code] · scale. With ``nested`` [N, P + 1] scales are places in a map, the next 256 numbers of ``table``, whose values
    are multiplied by the scale of the scale, and to which the last number of ``nested`` is added; see ``Bnb4Matrix``.

    Args:
        codes: uint8 [N, K / 2], an input in the upper bits and the next one in the lower ones.
        table: float32 [16], or [272].
    """
    shape, num_nested = (len(codes), 2 * codes.shape[1]), 0
    if nested is not None and starts_N is not None:
        num_nested, nested = nested.shape[1] - 1, torch.cat((nested, starts_N[:, None].float()), 1)
    return Weights(shape, widen, (codes, scales_NG, nested, table), parts=2, is_woven=True, group=group, kind=num_nested)


@jit
def widen(
    codes, scales, nested, table, outputs, is_output, first, part: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """See ``matmul``. ``KIND``: -1 for MXFP4, else how many scales the scales of an output have."""
    SPAN: tl.constexpr = K // 2
    NUM_GROUPS: tl.constexpr = K // GROUP
    places = first + tl.arange(0, BK)
    mask = is_output[:, None] & (places < SPAN)[None, :]
    found = tl.load(codes + outputs[:, None] * SPAN + places[None, :], mask=mask, other=0)
    numbers = group_numbers(first, part, K, 2, True, GROUP, GROUPS, BK)
    mask = is_output[:, None] & (numbers < NUM_GROUPS)[None, :]
    scale = tl.load(scales + outputs[:, None] * NUM_GROUPS + numbers[None, :], mask=mask, other=0)
    if KIND == -1:
        code = (found >> 4 * part).to(tl.int16)
        # The bits of a float16 that is 2^14 times smaller.
        bits = ((code & 8) << 12) | ((code & 7) << 9)
        wide = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384
        return wide * spread(from_exponent(scale), GROUPS, BK)
    else:
        wide = tl.load(table + ((found >> 4 * (1 - part)) & 15))
        if KIND > 0:
            row = nested + outputs[:, None] * (KIND + 2)
            start = tl.load(row + KIND + 1, mask=is_output[:, None], other=0.0).to(tl.int32)
            factor = tl.load(row + (start + numbers[None, :]) // 256, mask=mask, other=0.0)
            added = tl.load(row + KIND, mask=is_output[:, None], other=0.0)
            scale = tl.load(table + 16 + scale, mask=mask, other=0.0) * factor + added
        return wide * spread(scale, GROUPS, BK)
