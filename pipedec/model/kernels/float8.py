"""Products with 8-bit floats (E4M3) that have scales, decoded by operations on integers: GPUs before 8.9 lack the type.

Shape legend as in ``matmul``; S and C blocks of outputs and of inputs that share a scale.
"""

from __future__ import annotations

from torch import Tensor

from pipedec.model.kernels.language import jit, tl
from pipedec.model.kernels.matmul import Weights, group_numbers, spread


def float8_weights(codes_NK: Tensor, scales_SC: Tensor, block: tuple[int, int]) -> Weights:
    """Number · scale.

    Args:
        codes_NK: the bits of the numbers, uint8, none of them NaN.
        scales_SC: floating-point numbers, or the exponents of powers of 2, uint8, 127 more than they stand for.
        block: outputs and inputs that share a scale; 0 inputs for all.
    """
    outputs, inputs = codes_NK.shape
    return Weights((outputs, inputs), widen, (codes_NK, scales_SC, None, None), group=min(block[1], inputs), kind=block[0])


@jit
def from_exponent(exponent):
    """float32 numbers with these exponents, integers that are 127 more than they stand for."""
    exponent = exponent.to(tl.int32)
    return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)


@jit
def widen(
    codes, scales, unused, table, outputs, is_output, first, part: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """See ``matmul``. ``KIND``: outputs that share a scale."""
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    places = first + tl.arange(0, BK)
    mask = is_output[:, None] & (places < K)[None, :]
    found = tl.load(codes + outputs[:, None] * K + places[None, :], mask=mask, other=0).to(tl.int16)
    # The bits of a float16 that is 256 times smaller.
    bits = ((found & 128) << 8) | ((found & 127) << 7)
    wide = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
    numbers = group_numbers(first, part, K, 1, False, GROUP, GROUPS, BK)
    where = outputs[:, None] // KIND * NUM_GROUPS + numbers[None, :]
    scale = tl.load(scales + where, mask=is_output[:, None] & (numbers < NUM_GROUPS)[None, :], other=0)
    scale = from_exponent(scale) if scales.dtype.element_ty == tl.uint8 else scale.to(tl.float32)
    return wide * spread(scale, GROUPS, BK)
