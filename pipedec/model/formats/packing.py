"""Numbers of 4 bits in bytes: the order in which they are kept, and that in which torch's kernel for processors reads them.

Shape legend: R rows in this step, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pipedec.formats import KERNEL_GROUPS
from pipedec.model.formats.base import LOADED_VALUES, Kernel

_PACKED_OUTPUTS = 16  # torch's kernel for 4 bits takes a multiple of this
_PACKED_STEP = 64  # outputs; parts that are packed one by one begin at a multiple of it


def packed_halves(values_NK: Tensor) -> Tensor:
    """int8 [N, K / 2] with the lower 4 bits of ``values_NK``: a byte holds an input of the first half in its lower bits, and its
    partner of the second half in its upper ones, so that halves are widened without interleaving.
    """
    lower, upper = values_NK.to(torch.int8).chunk(2, 1)
    return (lower & 15) | (upper << 4)


def unpacked_halves(packed: Tensor) -> Tensor:
    """The numbers of ``packed_halves`` from -8 to 7, int8 [N, K]."""
    return torch.cat(((packed << 4) >> 4, packed >> 4), 1)


def suits_int4_kernel(shape: torch.Size, group: int) -> bool:
    """Whether torch's kernel for 4 bits takes a matrix [N, K] of this shape."""
    outputs, inputs = shape
    return outputs % _PACKED_OUTPUTS == 0 and group in KERNEL_GROUPS and inputs % 64 == 0


def int4_kernel(values: Tensor, parts: Iterable[tuple[Tensor, Tensor]], group: int) -> tuple[Kernel, dict[str, Tensor]]:
    """torch's kernel for weights ``value · scale + zero`` and bfloat16 rows, and what it keeps in memory, for sizes that suit it.

    Args:
        values: see ``packed_halves``; they are packed anew in place.
        parts: scales and zeros of consecutive outputs, [n, G].
    """
    outputs, inputs = len(values), 2 * values.shape[1]
    scales_and_zeros = torch.empty(inputs // group, outputs, 2, dtype=torch.bfloat16, device=values.device)
    first = 0
    for part in parts:
        places = slice(first, first + len(part[0]))
        for place, numbers_nG in enumerate(part):
            scales_and_zeros[:, places, place] = numbers_nG.T
        first = places.stop
    packed = _packed(values)
    held = {"values": packed, "scales": scales_and_zeros}
    return lambda rows_RK: torch._weight_int4pack_mm_for_cpu(rows_RK, packed, group, scales_and_zeros), held


def _packed(values: Tensor) -> Tensor:
    """Repack in place: the kernel's blocks of outputs lie one after the other."""
    packed = values.view(torch.uint8)
    for part in _parts(values):
        packed[part] = torch._convert_weight_to_int4pack_for_cpu(_unsigned(values[part]).int(), 1)
    return packed


def _parts(values: Tensor) -> Iterator[slice]:
    """Consecutive outputs, so few at a time that copies of them take little memory."""
    at_once = LOADED_VALUES[values.device.type] // (2 * values.shape[1])
    step = max(at_once // _PACKED_STEP, 1) * _PACKED_STEP
    return (slice(start, min(start + step, len(values))) for start in range(0, len(values), step))


def _unsigned(values: Tensor) -> Tensor:
    """Values from 0 to 15, int8 [N, K]."""
    return unpacked_halves(values).add_(8)
