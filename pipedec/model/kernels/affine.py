"""Products with integers of 4 or 8 bits that have scales, and perhaps zero points or smallest weights.

Shape legend as in ``matmul``; G groups of inputs.
"""

from __future__ import annotations

from torch import Tensor

from pipedec.model.kernels.language import jit, tl
from pipedec.model.kernels.matmul import Weights, as_float, group_numbers, spread


def affine_weights(
    bits: int, inputs: int, group: int, codes: Tensor, scales_NG: Tensor, zeros_NG: Tensor | None = None,
    groups_K: Tensor | None = None,
) -> Weights:  # fmt: skip
    """(code − zero) · scale.

    Args:
        group: consecutive inputs that share a scale; 0 for all.
        codes: int8, less 8 in ``packed_halves``, or less 128 [N, K].
        zeros_NG: uint8; None if all are 8, or 128.
        groups_K: int32, the group of each input, if not consecutive ones share theirs.
    """
    buffers, is_ordered = (codes, scales_NG, zeros_NG, groups_K), groups_K is not None
    return Weights((len(codes), inputs), widen, buffers, parts=8 // bits, group=group, is_gathered=is_ordered, kind=bits)


def shifted_weights(inputs: int, group: int, codes: Tensor, sixteenths_and_zeros: Tensor) -> Weights:
    """code · scale + the weight of 0, of codes from -8 to 7 in ``packed_halves`` and [N, 2, G] with a sixteenth of the scales."""
    return Weights((len(codes), inputs), widen, (codes, sixteenths_and_zeros, None, None), parts=2, group=group, kind="shifted")


@jit
def widen(
    codes, scales, zeros, groups, outputs, is_output, first, part: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """See ``matmul``. ``KIND``: the bits, or ``shifted``."""
    PARTS: tl.constexpr = 1 if KIND == 8 else 2
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    SPAN: tl.constexpr = K // PARTS
    places = first + tl.arange(0, BK)
    mask = is_output[:, None] & (places < SPAN)[None, :]
    found = tl.load(codes + outputs[:, None] * SPAN + places[None, :], mask=mask, other=0).to(tl.int32)
    if PARTS == 2 and part == 1:
        found >>= 4
    MIDDLE: tl.constexpr = 128 if PARTS == 1 else 8
    found = (found ^ MIDDLE) & (2 * MIDDLE - 1)
    numbers = group_numbers(first, part, K, PARTS, False, GROUP, GROUPS, BK)
    if groups is not None:
        numbers = tl.load(groups + places + part * SPAN, mask=places < SPAN, other=0)
    mask = is_output[:, None] & (numbers < NUM_GROUPS)[None, :]
    if KIND == "shifted":
        where = outputs[:, None] * (2 * NUM_GROUPS) + numbers[None, :]
        scale = tl.load(scales + where, mask=mask, other=0.0).to(tl.float32) * 16
        lowest = tl.load(scales + where + NUM_GROUPS, mask=mask, other=0.0).to(tl.float32)
        return as_float(found, MIDDLE) * spread(scale, GROUPS, BK) + spread(lowest, GROUPS, BK)
    else:
        where = outputs[:, None] * NUM_GROUPS + numbers[None, :]
        scale = tl.load(scales + where, mask=mask, other=0.0).to(tl.float32)
        if zeros is None:
            return as_float(found, MIDDLE) * spread(scale, GROUPS, BK)
        else:
            zero = tl.load(zeros + where, mask=mask, other=0).to(tl.float32)
            return as_float(found, spread(zero, GROUPS, BK)) * spread(scale, GROUPS, BK)
