"""Matrices of 8-bit floating-point numbers with scales, as they are in the file.

Shape legend: N outputs, K inputs, S and C blocks of outputs and of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.formats import Float8, Format
from pipedec.model.formats.base import Held, QuantizedMatrix
from pipedec.model.kernels.float8 import float8_weights
from pipedec.model.kernels.matmul import Weights

_HELD_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # exponents are kept as bytes


class Float8Matrix(QuantizedMatrix):
    """Attributes of ``held``:
    codes: the bits of the numbers, uint8 [N, K].
    scales: [S, C], in the type of the file; a scale of the whole matrix is repeated for each output.
    """

    format: Float8

    def __init__(self, format: Float8, shape: tuple[int, int], dtype: torch.dtype, held: Held) -> None:
        super().__init__(format, shape, dtype, held)
        self.steps = {"scales": format.step}

    @classmethod
    def empty(cls, format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Self:
        assert isinstance(format, Float8)
        codes_NK = torch.empty(outputs, inputs, dtype=torch.uint8, device=device)
        kind = _HELD_DTYPES.get(format.scale_dtype, torch.uint8)
        scales_SC = torch.empty(format.grid((outputs, inputs)), dtype=kind, device=device)
        return cls(format, (outputs, inputs), dtype, {"codes": codes_NK, "scales": scales_SC})

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises UserError for numbers that are NaN."""
        scales, held_SC = tensors[self.format.scale], self.held["scales"]
        codes_NK = tensors["weight"].view(torch.uint8)
        if bool(((codes_NK & 127) == 127).any()):
            raise UserError("it holds numbers that are NaN: download the checkpoint again")
        self.held["codes"].copy_(codes_NK)
        bits = scales.view(torch.uint8) if held_SC.dtype == torch.uint8 else scales
        held_SC.copy_(bits.reshape(1, 1) if bits.numel() == 1 else bits.reshape(held_SC.shape))

    def values(self, held: Held) -> Tensor:
        scales_NC, columns = held["scales"], self.format.block[1]
        scales_NC = powers_of_two(scales_NC) if scales_NC.dtype == torch.uint8 else scales_NC.float()
        wide_NK = widened_float8(held["codes"])
        if scales_NC.shape[1] == 1:
            return wide_NK.mul_(scales_NC)
        whole = wide_NK.shape[1] // columns * columns
        wide_NK[:, :whole].unflatten(1, (-1, columns)).mul_(scales_NC[:, : whole // columns, None])
        if whole < wide_NK.shape[1]:
            wide_NK[:, whole:].mul_(scales_NC[:, -1:])
        return wide_NK

    def stored(self) -> Weights:
        return float8_weights(self.held["codes"], self.held["scales"], (self.format.step, self.format.block[1]))


def widened_float8(codes: Tensor) -> Tensor:
    """float32 numbers of which ``codes`` are the bits, none of them NaN."""
    if codes.device.type != "cpu":
        return codes.view(torch.float8_e4m3fn).float()
    # The bits of a float16 that is 256 times smaller; a conversion takes six times as long.
    halves = codes.view(torch.int8).to(torch.int16).mul_(128).bitwise_and_(~0x4000)
    return halves.view(torch.float16).float().mul_(256)


def powers_of_two(exponents: Tensor) -> Tensor:
    """float32 numbers with these exponents, uint8, which are 127 more than they stand for; 255 is not a number."""
    return exponents.view(torch.float8_e8m0fnu).float()
