"""Matrices of weights: how they are rounded, kept, and multiplied by. Knows neither layers nor checkpoints.

A float32 matrix on a CPU may be *packed* in the order in which oneDNN's kernels read it. It takes as much memory as before, and
a product with few rows then takes as long as reading the matrix once, which ``functional.linear`` is far from between 2 and 64
rows.

A *quantized* matrix has 8 or 4 bits per weight. Where torch has a kernel for it (bfloat16), that reads it as it is. Elsewhere
slices of it are widened to the type of the activations, small enough to stay in a processor's cache.

Shape legend: R rows in this step, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.checkpoints.formats import QUANTIZED_GROUP as GROUP
from pipedec.checkpoints.formats import WIDENED_VALUES
from pipedec.core.errors import UserError

PADDED_ROWS = 16  # see ``Products``
TYPICAL_ROWS = 16  # the packed layout is chosen for products of this many rows
SMALLEST_PACKED = 192 * 192  # numbers; below, a call of the packed kernel costs more than it saves
_SLICE_VALUES = {"cpu": 1 << 19, "cuda": WIDENED_VALUES}  # widened at once
LOADED_VALUES = {"cpu": 1 << 19, "cuda": 1 << 22}  # rounded at once, in float32 and float64
_PACKED_OUTPUTS = 16  # torch's kernels for 4 bits take a multiple of this
_PACKED_BLOCK = 1024  # outputs packed at once

Kernel = Callable[[Tensor], Tensor]


class QuantizedMatrix:
    """A matrix [N, K] that replaces a weight: it is filled by ``copy_``, whole or by its parts, and then sealed.

    Attributes:
        values: the rounded weights, int8, one row per output.
        scales: in the type of the activations, one row per output.
    """

    def __init__(self, values: Tensor, scales: Tensor, num_inputs: int) -> None:
        self.values, self.scales = values, scales
        self.shape = torch.Size((len(scales), num_inputs))
        self._kernel: Kernel | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, outputs: slice) -> QuantizedMatrix:
        """A view."""
        return type(self)(self.values[outputs], self.scales[outputs], self.shape[1])

    def split(self, sizes: Sequence[int]) -> list[QuantizedMatrix]:
        """Views of consecutive outputs."""
        ends = list(accumulate(sizes))
        return [self[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def copy_(self, weight_NK: Tensor) -> None:
        """Round these weights, slice by slice."""
        for part in self._slices(LOADED_VALUES):
            values, scales = self._rounded(weight_NK[part].to(self.values.device, torch.float32))
            self.values[part], self.scales[part] = values, scales

    def seal(self) -> None:
        """Prepare the products, after all weights are in place."""
        if self.scales.dtype == torch.bfloat16:
            self._kernel = self._packed()

    def linear(self, rows_RK: Tensor) -> Tensor:
        """rows · matrixᵀ, [R, N]. As in an ordinary product, the last bits of a row may depend on the number of rows."""
        if self._kernel is not None:
            return self._kernel(rows_RK)
        parts = [functional.linear(rows_RK, self._widened(part)) for part in self._slices(_SLICE_VALUES)]
        return self._finished(parts[0] if len(parts) == 1 else torch.cat(parts, 1), rows_RK)

    def tensors(self) -> list[Tensor]:
        """All tensors that it keeps in memory."""
        return [self.values, self.scales]

    def _slices(self, num_values: Mapping[str, int]) -> Iterator[slice]:
        """Outputs with about this many values, by the type of the device."""
        step = max(1, num_values[self.values.device.type] // self.shape[1])
        return (slice(start, start + step) for start in range(0, len(self), step))

    def _rounded(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Values and scales of some float32 weights."""
        raise NotImplementedError

    def _widened(self, part: slice) -> Tensor:
        """The values of some outputs as a factor of ``linear``."""
        raise NotImplementedError

    def _finished(self, product_RN: Tensor, rows_RK: Tensor) -> Tensor:
        """The product with the matrix, from that with the widened values."""
        raise NotImplementedError

    def _packed(self) -> Kernel | None:
        """torch's kernel for the product with bfloat16 rows, with the values packed for it; None if there is none."""
        raise NotImplementedError


class Int8Matrix(QuantizedMatrix):
    """8 bits and one scale per output, symmetric."""

    @classmethod
    def empty(cls, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Int8Matrix:
        values = torch.empty(outputs, inputs, dtype=torch.int8, device=device)
        return cls(values, torch.empty(outputs, dtype=dtype, device=device), inputs)

    def rows(self, ids_R: Tensor) -> Tensor:
        """Rows of the matrix, as for an embedding, [R, K]."""
        return functional.embedding(ids_R, self.values).to(self.scales.dtype).mul_(self.scales[ids_R, None])

    def _rounded(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        scales_N = (weight_NK.abs().amax(1) / 127).to(self.scales.dtype)
        divisors_N1 = scales_N.float().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        return (weight_NK / divisors_N1).round_().clamp_(-127, 127).to(torch.int8), scales_N

    def _widened(self, part: slice) -> Tensor:
        return self.values[part].to(self.scales.dtype)

    def _finished(self, product_RN: Tensor, rows_RK: Tensor) -> Tensor:
        return product_RN.mul_(self.scales)

    def _packed(self) -> Kernel | None:
        if self.values.device.type != "cpu":
            return None
        return lambda rows_RK: torch._weight_int8pack_mm(rows_RK, self.values, self.scales)


class Int4Matrix(QuantizedMatrix):
    """4 bits from -8 to 7, and for each ``GROUP`` inputs of an output a scale and the weight of 0.

    A value holds an input of the first half in its lower bits, and its partner of the second half in its upper ones.

    Attributes:
        scales: [N, 2, K / GROUP], a sixteenth of the scales, so that lower bits need not be shifted back, and the weights of 0.
    """

    @classmethod
    def empty(cls, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Int4Matrix:
        """A matrix without values. Raises UserError if it cannot be halved into whole groups."""
        if inputs % (2 * GROUP):
            raise UserError(f"int4 takes matrices whose inputs are a multiple of {2 * GROUP}, not {inputs}: use int8")
        values = torch.empty(outputs, inputs // 2, dtype=torch.int8, device=device)
        return cls(values, torch.empty(outputs, 2, inputs // GROUP, dtype=dtype, device=device), inputs)

    def _rounded(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        grouped = weight_NK.unflatten(1, (-1, GROUP))
        low, high = grouped.aminmax(dim=2)
        sixteenths = ((high - low) / (15 * 16)).to(self.scales.dtype)
        zeros = (low.double() + 8 * 16 * sixteenths.double()).to(self.scales.dtype)
        divisors = 16 * sixteenths.float().clamp(min=torch.finfo(torch.float32).tiny)
        values_NK = ((grouped - zeros.float()[..., None]) / divisors[..., None]).round_().clamp_(-8, 7).to(torch.int8).flatten(1)
        lower, upper = values_NK.chunk(2, 1)
        return (lower & 15) | (upper << 4), torch.stack((sixteenths, zeros), 1)

    def _widened(self, part: slice) -> Tensor:
        values = self.values[part]
        wide_NK = torch.cat((values << 4, values & -16), 1).to(self.scales.dtype)
        wide_NK.unflatten(1, (-1, GROUP)).mul_(self.scales[part, 0, :, None])
        return wide_NK

    def _finished(self, product_RN: Tensor, rows_RK: Tensor) -> Tensor:
        return product_RN.add_(functional.linear(rows_RK.unflatten(1, (-1, GROUP)).sum(2), self.scales[:, 1]))

    def _packed(self) -> Kernel | None:
        if len(self) % _PACKED_OUTPUTS:
            return None
        scales_and_zeros = (self.scales * self.scales.new_tensor([[16], [1]])).permute(2, 0, 1).contiguous()
        if self.values.device.type == "cpu":
            multiply, self.values = torch._weight_int4pack_mm_for_cpu, self._packed_for_cpu()
        else:
            multiply, self.values = torch._weight_int4pack_mm, self.packed_for_cuda()
        self.scales = scales_and_zeros
        return lambda rows_RK: multiply(rows_RK, self.values, GROUP, scales_and_zeros)

    def _packed_for_cpu(self) -> Tensor:
        """Repack in place: the kernel's blocks of outputs lie one after the other."""
        packed = self.values.view(torch.uint8)
        for start in range(0, len(self), _PACKED_BLOCK):
            part = slice(start, start + _PACKED_BLOCK)
            packed[part] = torch._convert_weight_to_int4pack_for_cpu(self._unsigned(part).int(), 1)
        return packed

    def packed_for_cuda(self) -> Tensor:
        """The values as CUDA's kernel reads them, int32 [N / 8, K / (16 · T), 32, T / 2] with T tiles of 16 inputs side by side.
        Repacked in place, as tiles of 8 outputs lie one after the other.
        """
        tiles = 8 if self.shape[1] % 128 == 0 else 4
        packed = self.values.view(torch.int32).view(len(self) // 8, self.shape[1] // (16 * tiles), 32, tiles // 2)
        for start in range(0, len(self), _PACKED_BLOCK):
            part = slice(start, start + _PACKED_BLOCK)
            unsigned_NK = self._unsigned(part)
            pairs = (unsigned_NK[:, ::2] << 4 | unsigned_NK[:, 1::2]).view(torch.uint8)
            packed[start // 8 : part.stop // 8] = torch._convert_weight_to_int4pack(pairs, tiles)
        return packed

    def _unsigned(self, part: slice) -> Tensor:
        """Values from 0 to 15, [N, K]."""
        values = self.values[part]
        return torch.cat(((values << 4) >> 4, values >> 4), 1).add_(8)


Matrix = Tensor | QuantizedMatrix
Empty = Callable[[int, int, torch.dtype, torch.device], QuantizedMatrix]
EMPTY_MATRICES: dict[str, Empty] = {"int8": Int8Matrix.empty, "int4": Int4Matrix.empty}


def rounded(weight_NK: Tensor, quantize: str) -> Tensor:
    """The weights that their quantized matrix represents, in their dtype."""
    outputs, inputs = weight_NK.shape
    matrix = EMPTY_MATRICES[quantize](outputs, inputs, weight_NK.dtype, weight_NK.device)
    matrix.copy_(weight_NK)
    return matrix.linear(torch.eye(inputs, dtype=weight_NK.dtype, device=weight_NK.device)).T


def pack(weight_NK: Tensor) -> Tensor:
    """The matrix for ``linear``: packed if this pays on its device, else as it is.

    A packed matrix has the layout ``torch._mkldnn``: only ``linear`` accepts it.
    """
    supported = weight_NK.dtype == torch.float32 and weight_NK.device.type == "cpu" and torch.backends.mkldnn.is_available()
    pays = supported and weight_NK.numel() >= SMALLEST_PACKED
    return torch.ops.mkldnn._reorder_linear_weight(weight_NK, TYPICAL_ROWS) if pays else weight_NK


def prepared(matrix: Matrix) -> Matrix:
    """The matrix for ``linear`` when its weights have been read: sealed or packed."""
    if isinstance(matrix, Tensor):
        return pack(matrix)
    matrix.seal()
    return matrix


def linear(rows_RK: Tensor, matrix: Matrix, bias_N: Tensor | None = None) -> Tensor:
    """rows · matrixᵀ (+ bias), [R, N], for a plain, packed or quantized matrix."""
    if not isinstance(matrix, Tensor):
        product_RN = matrix.linear(rows_RK)
        return product_RN if bias_N is None else product_RN.add_(bias_N)
    if matrix.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.default(rows_RK, matrix, bias_N, "none", [], "")
    return functional.linear(rows_RK, matrix, bias_N)


class Products:
    """``linear`` for the matrices of a stage.

    Attributes:
        pad_rows: pad products to ``PADDED_ROWS`` rows. Where a row of a product of at least that many does not depend on their
            number, as on the CPUs that were measured, the bits of an answer then do not depend on other requests.
    """

    def __init__(self) -> None:
        self.pad_rows = False

    def __call__(self, rows_RK: Tensor, matrix: Matrix, bias_N: Tensor | None = None) -> Tensor:
        if not self.pad_rows or (missing := PADDED_ROWS - rows_RK.shape[0]) <= 0:
            return linear(rows_RK, matrix, bias_N)
        return linear(functional.pad(rows_RK, (0, 0, 0, missing)), matrix, bias_N)[: rows_RK.shape[0]]
