"""Matrices that are rounded to 8 or 4 bits while they are read (``--quantize``).

Shape legend: R rows in this step, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.core.errors import UserError
from pipedec.formats import ROUNDED, Format, Rounded
from pipedec.model.formats.base import LOADED_VALUES, Held, QuantizedMatrix
from pipedec.model.formats.packing import int4_kernel, packed_halves, suits_int4_kernel
from pipedec.model.kernels.affine import affine_weights, shifted_weights
from pipedec.model.kernels.matmul import Weights


class RoundedMatrix(QuantizedMatrix):
    """Attributes of ``held``:
    values: the rounded weights, int8, one row per output.
    scales: in the type of the activations, one row per output.
    """

    format: Rounded

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Round these weights, slice by slice."""
        first = 0
        for part in self.slices(LOADED_VALUES):
            weight_NK = tensors["weight"][first : first + len(part)].to(self.device, torch.float32)
            values, scales = part.rounded(weight_NK)
            part.held["values"].copy_(values)
            part.held["scales"].copy_(scales)
            first += len(part)

    @abstractmethod
    def rounded(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Values and scales of float32 weights of this shape."""

    @property
    def scales(self) -> Tensor:
        return self.held["scales"]


class Int8Matrix(RoundedMatrix):
    """8 bits and one scale per output, symmetric."""

    @classmethod
    def empty(cls, format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Self:
        values = torch.empty(outputs, inputs, dtype=torch.int8, device=device)
        scales = torch.empty(outputs, dtype=dtype, device=device)
        return cls(format, (outputs, inputs), dtype, {"values": values, "scales": scales})

    def rounded(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        scales_N = (weight_NK.abs().amax(1) / 127).to(self.dtype)
        divisors_N1 = scales_N.float().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        return (weight_NK / divisors_N1).round_().clamp_(-127, 127).to(torch.int8), scales_N

    def product(self, rows_RK: Tensor) -> Tensor:
        return functional.linear(rows_RK, self.held["values"].to(self.dtype)).mul_(self.scales)

    def values(self, held: Held) -> Tensor:
        return held["values"].to(self.dtype).mul_(held["scales"][:, None])

    def prepared(self, keeps_rows: bool = False) -> Self:
        if self.takes_torch_kernel(keeps_rows=False):
            self._kernel = lambda rows_RK: torch._weight_int8pack_mm(rows_RK, self.held["values"], self.scales)
        return self

    def stored(self) -> Weights:
        return affine_weights(8, self.shape[1], 0, self.held["values"], self.scales)


class Int4Matrix(RoundedMatrix):
    """4 bits from -8 to 7, and for each group of inputs of an output a scale and the weight of 0.

    Attributes of ``held``:
    values: see ``packed_halves``.
    scales: [N, 2, G], a sixteenth of the scales, so that lower bits need not be shifted back, and the weights of 0.
    """

    @classmethod
    def empty(cls, format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A matrix without values. Raises UserError if it cannot be halved into whole groups."""
        assert isinstance(format, Rounded)
        if inputs % (2 * format.group):
            raise UserError(f"int4 takes matrices whose inputs are a multiple of {2 * format.group}, not {inputs}: use int8")
        values = torch.empty(outputs, inputs // 2, dtype=torch.int8, device=device)
        scales = torch.empty(outputs, 2, inputs // format.group, dtype=dtype, device=device)
        return cls(format, (outputs, inputs), dtype, {"values": values, "scales": scales})

    def rounded(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        grouped = weight_NK.unflatten(1, (-1, self.format.group))
        low, high = grouped.aminmax(dim=2)
        sixteenths = ((high - low) / (15 * 16)).to(self.dtype)
        zeros = (low.double() + 8 * 16 * sixteenths.double()).to(self.dtype)
        divisors = 16 * sixteenths.float().clamp(min=torch.finfo(torch.float32).tiny)
        values_NK = ((grouped - zeros.float()[..., None]) / divisors[..., None]).round_().clamp_(-8, 7).to(torch.int8).flatten(1)
        return packed_halves(values_NK), torch.stack((sixteenths, zeros), 1)

    def product(self, rows_RK: Tensor) -> Tensor:
        product_RN = functional.linear(rows_RK, self._without_zeros(self.held))
        sums_RG = rows_RK.unflatten(1, (-1, self.format.group)).sum(2)
        return product_RN.add_(functional.linear(sums_RG, self.scales[:, 1]))

    def values(self, held: Held) -> Tensor:
        wide_NK = self._without_zeros(held)
        wide_NK.unflatten(1, (-1, self.format.group)).add_(held["scales"][:, 1, :, None])
        return wide_NK

    def _without_zeros(self, held: Held) -> Tensor:
        values = held["values"]
        wide_NK = torch.cat((values << 4, values & -16), 1).to(self.dtype)
        wide_NK.unflatten(1, (-1, self.format.group)).mul_(held["scales"][:, 0, :, None])
        return wide_NK

    def prepared(self, keeps_rows: bool = False) -> Self:
        if self.takes_torch_kernel(keeps_rows) and suits_int4_kernel(self.shape, self.format.group):
            parts = ((part.scales[:, 0] * 16, part.scales[:, 1]) for part in self.slices(LOADED_VALUES))
            self._kernel, self.held = int4_kernel(self.held["values"], parts, self.format.group)
        return self

    def stored(self) -> Weights:
        return shifted_weights(self.shape[1], self.format.group, self.held["values"], self.scales)


def empty_rounded(format: Rounded, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> RoundedMatrix:
    """A matrix without values. Raises UserError if its sizes do not suit the format."""
    kind = Int8Matrix if format.bits == 8 else Int4Matrix
    return kind.empty(format, outputs, inputs, dtype, device)


def rounded(weight_NK: Tensor, quantize: str) -> Tensor:
    """The weights that their quantized matrix represents, in their dtype."""
    outputs, inputs = weight_NK.shape
    matrix = empty_rounded(ROUNDED[quantize], outputs, inputs, weight_NK.dtype, weight_NK.device)
    matrix.fill({"weight": weight_NK})
    return matrix.linear(torch.eye(inputs, dtype=weight_NK.dtype, device=weight_NK.device)).T
