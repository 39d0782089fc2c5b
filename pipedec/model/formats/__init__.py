"""Weights as they are stored: for each kind of ``pipedec.formats``, the matrix that reads it and computes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from itertools import groupby

import torch
from torch import Tensor

from pipedec.formats import Format, Plain, Rounded
from pipedec.model.formats.base import QuantizedMatrix
from pipedec.model.formats.rounded import empty_rounded, rounded
from pipedec.model.matrices import DenseMatrix, Matrix, StackedMatrix

__all__ = ["QuantizedMatrix", "WidenedMatrix", "empty_matrix", "rounded", "stacked"]


Empty = Callable[[Any, int, int, torch.dtype, torch.device], QuantizedMatrix]
KINDS: dict[type[Format], Empty] = {Rounded: empty_rounded}  # how a matrix without values is made


class WidenedMatrix(DenseMatrix):
    """Floating-point numbers of a matrix that is stored in fewer bits, widened as they are read."""

    def __init__(self, weight_NK: Tensor, format: Format) -> None:
        super().__init__(weight_NK)
        self.format = format

    def __getitem__(self, outputs: slice) -> WidenedMatrix:
        return WidenedMatrix(self.weight_NK[outputs], self.format)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        part = empty_matrix(self.format, self.shape[0], self.shape[1], self.weight_NK.dtype, self.weight_NK.device)
        part.fill(tensors)
        self.weight_NK.copy_(part.widened() if isinstance(part, QuantizedMatrix) else part.weight_NK)


def empty_matrix(
    format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> DenseMatrix | QuantizedMatrix:
    """A matrix without values. Raises UserError if its sizes do not suit its format."""
    if isinstance(format, Plain):
        return DenseMatrix(torch.empty(outputs, inputs, dtype=dtype, device=device))
    return KINDS[type(format)](format, outputs, inputs, dtype, device)


def stacked(formats: Sequence[Format], outputs: Sequence[int], inputs: int, dtype: torch.dtype, device: torch.device) -> Matrix:
    """A matrix of matrices one below the other, which are one in memory where their formats allow that."""
    blocks: list[Matrix] = []
    runs: list[tuple[Format, int]] = []
    for format, size in zip(formats, outputs, strict=True):
        last, before = runs[-1] if runs else (None, 0)
        if format == last and format.is_fusable and before % format.step == 0:
            runs[-1] = format, before + size
        else:
            runs.append((format, size))
    blocks = [empty_matrix(format, size, inputs, dtype, device) for format, size in runs]
    return blocks[0] if len(blocks) == 1 else StackedMatrix(blocks)
