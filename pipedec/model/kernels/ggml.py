"""Products with blocks of GGUF files, as ``model.formats.ggml`` keeps them.

Shape legend as in ``matmul``; S blocks of a row.
"""

from __future__ import annotations

from torch import Tensor

from pipedec.model.kernels.language import jit, tl
from pipedec.model.kernels.matmul import Weights, as_float, group_numbers, spread

# A part for each plane of upper bits, or for each half.
_PARTS = {"Q8_0": 1, "Q4_0": 2, "Q4_1": 2, "Q4_K": 2, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q6_K": 4}


def ggml_weights(kind: str, inputs: int, group: int, codes: Tensor, scales: Tensor, upper: Tensor | None) -> Weights:
    """Weights of a type of llama.cpp, by its name ``kind``, from the tensors of a ``GgmlMatrix``."""
    buffers = codes, scales, upper, None
    return Weights((len(codes), inputs), widen, buffers, parts=_PARTS[kind], group=group, kind=kind)


@jit
def _scales_of_k(blocks, of_block, mask):
    """Scales and smallest weights of groups of Q4_K and Q5_K, from the 16 bytes of a block: two factors, then 6 bits for each of
    8 groups, twice.
    """
    place = of_block % 4
    scale = tl.load(blocks + 4 + place, mask=mask, other=0).to(tl.int32)
    lowest = tl.load(blocks + 8 + place, mask=mask, other=0).to(tl.int32)
    last = tl.load(blocks + 12 + place, mask=mask, other=0).to(tl.int32)
    is_first = of_block < 4
    scale = tl.where(is_first, scale & 63, (last & 15) | ((scale >> 2) & 48)).to(tl.float32)
    lowest = tl.where(is_first, lowest & 63, (last >> 4) | ((lowest >> 2) & 48)).to(tl.float32)
    factors = blocks.to(tl.pointer_type(tl.float16))
    scale = scale * tl.load(factors, mask=mask, other=0.0).to(tl.float32)
    return scale, lowest * -tl.load(factors + 1, mask=mask, other=0.0).to(tl.float32)


@jit
def widen(
    codes, scales, upper, table, outputs, is_output, first, part: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, KIND: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """See ``matmul``. ``KIND``: the type."""
    PLANES: tl.constexpr = 8 if KIND == "Q5_0" or KIND == "Q5_1" or KIND == "Q5_K" else 4 if KIND == "Q6_K" else 1
    PARTS: tl.constexpr = 1 if KIND == "Q8_0" else 2 if PLANES == 1 else PLANES
    ZERO: tl.constexpr = 8 if KIND == "Q4_0" else 16 if KIND == "Q5_0" else 32 if KIND == "Q6_K" else 128 if KIND == "Q8_0" else 0
    SPAN: tl.constexpr = K // PARTS
    ROW: tl.constexpr = K if PARTS == 1 else K // 2
    NUM_GROUPS: tl.constexpr = K // GROUP
    places = first + tl.arange(0, BK)
    mask = is_output[:, None] & (places < SPAN)[None, :]
    HALF: tl.constexpr = max(PARTS // 2, 1)
    found = tl.load(codes + outputs[:, None] * ROW + (part % HALF) * SPAN + places[None, :], mask=mask, other=0)
    found = found.to(tl.int32)
    if PARTS > 1:
        found = found & 15 if part < HALF else found >> 4
    if PLANES > 1:
        BITS: tl.constexpr = 8 // PLANES
        above = tl.load(upper + outputs[:, None] * SPAN + places[None, :], mask=mask, other=0).to(tl.int32)
        found = found | (((above >> BITS * part) & ((1 << BITS) - 1)) << 4)
    if PARTS == 1:
        found = (found ^ 128) & 255
    wide = as_float(found, ZERO)
    numbers = group_numbers(first, part, K, PARTS, False, GROUP, GROUPS, BK)
    mask = is_output[:, None] & (numbers < NUM_GROUPS)[None, :]
    if KIND == "Q6_K":
        blocks = scales + (outputs[:, None] * (K // 256) + numbers[None, :] // 16) * 18
        factor = tl.load((blocks + 16).to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)
        scale = tl.load((blocks + numbers[None, :] % 16).to(tl.pointer_type(tl.int8)), mask=mask, other=0)
        return wide * spread(factor * scale.to(tl.float32), GROUPS, BK)
    elif KIND == "Q4_K" or KIND == "Q5_K":
        blocks = scales + (outputs[:, None] * (K // 256) + numbers[None, :] // 8) * 16
        scale, lowest = _scales_of_k(blocks, numbers[None, :] % 8, mask)
        return wide * spread(scale, GROUPS, BK) + spread(lowest, GROUPS, BK)
    else:
        HALVES: tl.constexpr = 2 if KIND == "Q4_1" or KIND == "Q5_1" else 1
        where = scales.to(tl.pointer_type(tl.float16)) + (outputs[:, None] * NUM_GROUPS + numbers[None, :]) * HALVES
        wide = wide * spread(tl.load(where, mask=mask, other=0.0).to(tl.float32), GROUPS, BK)
        if HALVES == 2:
            wide = wide + spread(tl.load(where + 1, mask=mask, other=0.0).to(tl.float32), GROUPS, BK)
        return wide
