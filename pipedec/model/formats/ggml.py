"""Matrices of GGUF files in the bits of their blocks, whose values are exactly those of the ``gguf`` library.

The bits of a row are kept in another order than in the file, so that many inputs are widened at once: codes of 4 bits as in
``packing``, the upper bits of larger codes in planes, the scales of all blocks side by side.

Shape legend: n outputs, N outputs of the matrix, K inputs, S blocks, P planes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.core.errors import UserError
from pipedec.formats import Format, Ggml
from pipedec.formats.tables import MXFP4_GROUP
from pipedec.model.formats.base import LOADED_VALUES, Held, QuantizedMatrix
from pipedec.model.formats.packing import int4_kernel, packed_halves, suits_int4_kernel
from pipedec.model.formats.scratch import scratch
from pipedec.model.formats.tables import Mxfp4Matrix
from pipedec.model.kernels.ggml import ggml_weights
from pipedec.model.kernels.matmul import Weights

_Held = TypeVar("_Held", bound=QuantizedMatrix)
_HALF = 8  # what torch's kernel subtracts from codes of 4 bits
_SIX, _FOUR, _UPPER = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030  # the lower 6 and 4 bits of four bytes, and the upper ones of 6


@dataclass(frozen=True)
class _Layout:
    """Where the parts of a block are, by bytes.

    Attributes:
        scales: of its groups.
        lower: codes, of which bytes hold the lower 4 bits of two; of 8 bits if ``lower_run`` is 0.
        lower_run: consecutive inputs whose bits are the lower ones of as many bytes; those of the next ones are the upper.
        upper: the bits of codes above 4, if they have more.
        upper_bits: how many of them each input has.
        upper_run: consecutive inputs whose bits are at the same place of as many bytes, those of the next ones above them; 1
            for one input after another.
        zero: the code of 0; None if a block has its smallest weights, too.
        group: inputs that share a scale.
    """

    scales: slice
    lower: slice
    lower_run: int = 0
    upper: slice | None = None
    upper_bits: int = 0
    upper_run: int = 1
    zero: int | None = None
    group: int = 32


_LAYOUTS = {
    "Q8_0": _Layout(slice(2), slice(2, 34), zero=0),
    "Q4_0": _Layout(slice(2), slice(2, 18), 16, zero=8),
    "Q4_1": _Layout(slice(4), slice(4, 20), 16),
    "Q5_0": _Layout(slice(2), slice(6, 22), 16, slice(2, 6), 1, zero=16),
    "Q5_1": _Layout(slice(4), slice(8, 24), 16, slice(4, 8), 1),
    "Q4_K": _Layout(slice(16), slice(16, 144), 32),
    "Q5_K": _Layout(slice(16), slice(48, 176), 32, slice(16, 48), 1, 32),
    "Q6_K": _Layout(slice(192, 210), slice(128), 64, slice(128, 192), 2, 32, zero=32, group=16),
}


class GgmlMatrix(QuantizedMatrix):
    """Blocks of one type.

    Attributes of ``held``:
    codes: int8 [N, K] for Q8_0; else uint8 [N, K / 2], the lower 4 bits, of two halves of a row as in ``packed_halves``.
    upper: uint8 [N, K / P], the bits of codes above 4, if the type has any: the lowest are those of the first inputs.
    scales: uint8 [N, S, bytes], as they are in the blocks.
    """

    format: Ggml

    @classmethod
    def empty(cls, format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A matrix without values. Raises UserError if its rows are not whole blocks."""
        assert isinstance(format, Ggml)
        if inputs % format.block_inputs:
            raise UserError(f"{format.type} takes matrices whose inputs are a multiple of {format.block_inputs}, not {inputs}")
        layout, blocks = _LAYOUTS[format.type], inputs // format.block_inputs
        size, kind = (inputs // 2, torch.uint8) if layout.lower_run else (inputs, torch.int8)
        codes = torch.empty(outputs, size, dtype=kind, device=device)
        scales = torch.empty(outputs, blocks, _length(layout.scales), dtype=torch.uint8, device=device)
        held = {"codes": codes, "scales": scales}
        if layout.upper is not None:
            held["upper"] = torch.empty(outputs, inputs * layout.upper_bits // 8, dtype=torch.uint8, device=device)
        return cls(format, (outputs, inputs), dtype, held)

    @property
    def layout(self) -> _Layout:
        return _LAYOUTS[self.format.type]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the rows of the file, uint8 [N, S · bytes of a block], slice by slice."""
        for part, blocks in _slices(self, tensors["weight"], self.format.block_bytes):
            part._take(blocks)

    def _take(self, blocks: Tensor) -> None:
        layout = self.layout
        self.held["scales"].copy_(blocks[..., layout.scales])
        lower = blocks[..., layout.lower]
        if not layout.lower_run:
            self.held["codes"].copy_(lower.view(torch.int8).flatten(1))
            return
        self.held["codes"].copy_(packed_halves(_spread(lower, 4, layout.lower_run)).view(torch.uint8))
        if layout.upper is not None:
            planes = _spread(blocks[..., layout.upper], layout.upper_bits, layout.upper_run).chunk(8 // layout.upper_bits, 1)
            upper = self.held["upper"].zero_()
            for place, plane in enumerate(planes):
                upper |= plane << (place * layout.upper_bits)

    def product(self, rows_RK: Tensor) -> Tensor:
        wide_NK = scratch(self.shape, torch.float32, self.device)
        self._widen(self.held, wide_NK)
        if rows_RK.dtype != torch.float32:
            wide_NK = scratch(self.shape, rows_RK.dtype, self.device).copy_(wide_NK)
        return functional.linear(rows_RK, wide_NK)

    def values(self, held: Held) -> Tensor:
        wide_nK = torch.empty(len(held["codes"]), self.shape[1], device=self.device)
        self._widen(held, wide_nK)
        return wide_nK

    def _widen(self, held: Held, wide_nK: Tensor) -> None:
        """Write the values."""
        scales, smallest = self._scales(held)
        self._copy_codes(held, wide_nK)
        grouped = wide_nK.view(*scales.shape, self.layout.group).mul_(scales[..., None])
        if smallest is not None:
            grouped.add_(smallest[..., None])

    def _copy_codes(self, held: Held, wide_nK: Tensor) -> None:
        """Write the codes, less that of 0."""
        layout, packed = self.layout, held["codes"]
        if not layout.lower_run:
            wide_nK.copy_(packed)
            return
        halves = list(scratch((2, *packed.shape), torch.uint8, packed.device))
        torch.bitwise_and(packed, 15, out=halves[0])
        torch.bitwise_right_shift(packed, 4, out=halves[1])
        if layout.upper is not None:
            shifts = torch.arange(0, 8, layout.upper_bits, dtype=torch.int32, device=packed.device)[:, None]
            mask = 0x01010101 if layout.upper_bits == 1 else 0x03030303
            upper_nK = (held["upper"].view(torch.int32)[:, None] >> shifts & mask).view(torch.uint8).flatten(1)
            halves = [half.add_(upper, alpha=16) for half, upper in zip(halves, upper_nK.chunk(2, 1), strict=True)]
        for part, half in zip(wide_nK.chunk(2, 1), halves, strict=True):
            part.copy_(half.view(torch.int8).sub_(layout.zero) if layout.zero else half)

    def _scales(self, held: Held) -> tuple[Tensor, Tensor | None]:
        """float32 [n, S, groups of a block]: what codes are multiplied by, and what is added to them, if the type has that."""
        stored = held["scales"]
        factors = stored.view(torch.float16).float()  # the parts that are no numbers of this type are not used
        if self.format.type == "Q6_K":
            return factors[..., -1:] * stored[..., :16].view(torch.int8).float(), None
        if self.format.type in ("Q4_K", "Q5_K"):
            words = stored.view(torch.int32)  # of which three have 6 bits for each of 8 groups, twice
            lower, upper, last = words & _SIX, words >> 2 & _UPPER, words[..., 3]
            parts = (lower[..., 1], last & _FOUR | upper[..., 1], lower[..., 2], last >> 4 & _FOUR | upper[..., 2])
            steps = torch.stack(parts, 2).view(torch.uint8).float().unflatten(2, (2, 8))
            factors[..., 1].neg_()
            scales, smallest = steps.mul_(factors[..., :2, None]).unbind(2)
            return scales, smallest
        return factors[..., :1], factors[..., 1:] if self.layout.zero is None else None

    def prepared(self, keeps_rows: bool = False) -> Self:
        takes_kernel = self.format.has_kernel("bfloat16") and suits_int4_kernel(self.shape, self.layout.group)
        if self.takes_torch_kernel(keeps_rows) and takes_kernel:
            self._take_int4_kernel()
        return self

    def stored(self) -> Weights:
        held = self.held
        return ggml_weights(self.format.type, self.shape[1], self.layout.group, held["codes"], held["scales"], held.get("upper"))

    def _take_int4_kernel(self) -> None:
        """Use torch's kernel for 4 bits, with scales and weights of 0 in bfloat16.

        A code c, from -8 to 7, stands for the weight c · s + z. Rounding s and z moves it by (8 |s| + |z|) / 256 at most, and
        the largest weight that the group can have is 7 |s| + |z| at least: no weight is off by more than 8/7 of what rounding
        that largest one to bfloat16 may do.
        """
        signed = self.held["codes"].bitwise_xor_(_HALF | _HALF << 4).view(torch.int8)
        parts = (part._scales_and_zeros() for part in self.slices(LOADED_VALUES))
        self._kernel, self.held = int4_kernel(signed, parts, self.layout.group)

    def _scales_and_zeros(self) -> tuple[Tensor, Tensor]:
        """[n, groups of a row], as torch's kernel has them: it multiplies c − 8, and adds the weight of 8."""
        scales, smallest = self._scales(self.held)
        zeros = torch.zeros_like(scales) if smallest is None else smallest + _HALF * scales
        return scales.flatten(1), zeros.flatten(1)


class Mxfp4Blocks(Mxfp4Matrix):
    """Blocks of MXFP4: an exponent, then bytes whose lower 4 bits are those of the first half of the inputs."""

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """As ``GgmlMatrix.fill``."""
        for part, blocks in _slices(self, tensors["weight"], 1 + MXFP4_GROUP // 2):
            part.held["scales"].copy_(blocks[..., 0])
            codes = _spread(blocks[..., 1:], 4, MXFP4_GROUP // 2)
            part.held["codes"].copy_(codes[:, ::2] | codes[:, 1::2] << 4)


def empty_blocks(format: Ggml, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> QuantizedMatrix:
    """A matrix without values, of any type. Raises UserError if its rows are not whole blocks."""
    kind = Mxfp4Blocks if format.type == "MXFP4" else GgmlMatrix
    return kind.empty(format, outputs, inputs, dtype, device)


def _slices(matrix: _Held, rows: Tensor, block_bytes: int) -> Iterator[tuple[_Held, Tensor]]:
    """Parts of a matrix, with their blocks [n, S, bytes of a block] from the rows of the file."""
    first = 0
    for part in matrix.slices(LOADED_VALUES):
        yield part, rows[first : first + len(part)].to(matrix.device).unflatten(1, (-1, block_bytes))
        first += len(part)


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start or 0)


def _spread(packed: Tensor, bits: int, run: int) -> Tensor:
    """uint8 [n, K] with numbers of ``bits`` from bytes [n, S, bytes], in the order of the inputs; see ``_Layout``."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed.unflatten(2, (-1, 1, run)) >> shifts & ((1 << bits) - 1)).flatten(1)
