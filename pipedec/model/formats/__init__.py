"""Weights as they are stored: for each kind of ``pipedec.formats``, the matrix that reads it and computes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pipedec.formats import Affine, Bnb4, Float8, Format, Ggml, Mxfp4, Plain, Rounded
from pipedec.model.formats.affine import AffineMatrix
from pipedec.model.formats.base import QuantizedMatrix
from pipedec.model.formats.float8 import Float8Matrix
from pipedec.model.formats.ggml import empty_blocks
from pipedec.model.formats.rounded import empty_rounded, rounded
from pipedec.model.formats.tables import Bnb4Matrix, Mxfp4Matrix
from pipedec.model.matrices import DenseMatrix, Matrix, StackedMatrix

__all__ = ["QuantizedMatrix", "WidenedMatrix", "Widens", "as_stored", "empty_matrix", "rounded", "stacked"]


Widens = Callable[[Format], bool]
Empty = Callable[[Any, int, int, torch.dtype, torch.device], QuantizedMatrix]
KINDS: dict[type[Format], Empty] = {  # how a matrix without values is made
    Rounded: empty_rounded,
    Affine: AffineMatrix.empty,
    Float8: Float8Matrix.empty,
    Mxfp4: Mxfp4Matrix.empty,
    Bnb4: Bnb4Matrix.empty,
    Ggml: empty_blocks,
}


def as_stored(format: Format) -> bool:
    """Nothing is widened."""
    del format
    return False


class WidenedMatrix(DenseMatrix):
    """Floating-point numbers of matrices that are stored in fewer bits, one below the other, widened as they are read.

    Args:
        blocks: the format and the number of outputs of each.
    """

    def __init__(self, weight_NK: Tensor, blocks: Sequence[tuple[Format, int]]) -> None:
        super().__init__(weight_NK)
        self.format, self._blocks = blocks[0][0], blocks

    def __getitem__(self, outputs: slice) -> WidenedMatrix:
        first, last, _ = outputs.indices(len(self))
        ends = accumulate(size for _, size in self._blocks)
        found = [
            (format, min(last, end) - max(first, end - size))
            for (format, size), end in zip(self._blocks, ends, strict=True)
            if first < end and end - size < last
        ]
        return WidenedMatrix(self.weight_NK[first:last], found)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """The weights of one block."""
        if isinstance(self.format, Plain):
            super().fill(tensors)
            return
        outputs, inputs = self.shape
        stored = empty_matrix(self.format, outputs, inputs, self.weight_NK.dtype, self.weight_NK.device)
        stored.fill(tensors)
        self.weight_NK.copy_(stored.widened())


def empty_matrix(
    format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> DenseMatrix | QuantizedMatrix:
    """A matrix without values. Raises UserError if its sizes do not suit its format."""
    if isinstance(format, Plain):
        return DenseMatrix(torch.empty(outputs, inputs, dtype=dtype, device=device))
    return KINDS[type(format)](format, outputs, inputs, dtype, device)


def stacked(
    formats: Sequence[Format], outputs: Sequence[int], inputs: int, dtype: torch.dtype, device: torch.device,
    widens: Widens = as_stored,
) -> Matrix:  # fmt: skip
    """A matrix of matrices one below the other, which are one in memory where their formats allow that.

    Args:
        widens: whether a matrix of a format is widened as it is read.
    """
    runs: list[tuple[bool, list[tuple[Format, int]]]] = []
    for format, size in zip(formats, outputs, strict=True):
        is_dense = isinstance(format, Plain) or widens(format)
        if runs and is_dense == runs[-1][0] and (is_dense or _joins(runs[-1][1], format)):
            runs[-1][1].append((format, size))
        else:
            runs.append((is_dense, [(format, size)]))
    blocks: list[Matrix] = []
    for is_dense, run in runs:
        total = sum(size for _, size in run)
        if is_dense:
            blocks.append(WidenedMatrix(torch.empty(total, inputs, dtype=dtype, device=device), run))
        else:
            blocks.append(empty_matrix(run[0][0], total, inputs, dtype, device))
    return blocks[0] if len(blocks) == 1 else StackedMatrix(blocks)


def _joins(run: Sequence[tuple[Format, int]], format: Format) -> bool:
    """Whether a matrix of this format can be one with those before it."""
    before = sum(size for _, size in run)
    return format == run[0][0] and format.is_fusable and before % format.step == 0
