"""Matrices of weights: how they are kept, filled and multiplied by. Knows neither layers nor checkpoints.

Matrices of floating-point numbers are here, those that are kept in fewer bits in ``formats``. A float32 matrix on a CPU may be
*packed* in the order in which oneDNN's kernels read it. It takes as much memory as before, and a product with few rows then takes
as long as reading the matrix once, which ``functional.linear`` is far from between 2 and 64 rows.

Shape legend: R rows in this step, N outputs, K inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.formats import PLAIN, Format

PADDED_ROWS = 16  # see ``Products``
TYPICAL_ROWS = 16  # the packed layout is chosen for products of this many rows
SMALLEST_PACKED = 192 * 192  # numbers; below, a call of the packed kernel costs more than it saves


class Matrix(ABC):
    """A matrix [N, K] of weights, without values until it is filled, whole or by its parts, and then prepared.

    Attributes:
        format: how it lies in the file.
        shape: [N, K].
    """

    format: Format
    shape: torch.Size

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, outputs: slice) -> Matrix:
        """A view of some outputs, from one that ``Format.step`` divides."""

    def split(self, sizes: Sequence[int]) -> list[Matrix]:
        """Views of consecutive outputs."""
        ends = list(accumulate(sizes))
        return [self[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    @abstractmethod
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights from the tensors of the file, by suffix (see ``Format.tensors``)."""

    def prepared(self, keeps_rows: bool = False) -> Matrix:
        """The matrix for ``linear``, once its weights are in place; with ``keeps_rows`` this one is still good for ``rows``."""
        del keeps_rows
        return self

    @abstractmethod
    def linear(self, rows_RK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """rows · matrixᵀ (+ bias), [R, N]. The last bits of a row may depend on the number of rows."""

    @abstractmethod
    def rows(self, ids_R: Tensor) -> Tensor:
        """Rows of the matrix, as for an embedding, [R, K]."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All tensors that it keeps in memory."""


class DenseMatrix(Matrix):
    """Floating-point numbers, in the dtype of the activations. A packed one has the layout ``torch._mkldnn``, of which only
    ``linear`` can make use.
    """

    format: Format = PLAIN

    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK, self.shape = weight_NK, weight_NK.shape

    def __getitem__(self, outputs: slice) -> DenseMatrix:
        return DenseMatrix(self.weight_NK[outputs])

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight_NK.copy_(tensors["weight"])

    def prepared(self, keeps_rows: bool = False) -> DenseMatrix:
        """Packed if this pays on its device."""
        weight_NK = self.weight_NK
        supported = weight_NK.dtype == torch.float32 and weight_NK.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if not supported or weight_NK.numel() < SMALLEST_PACKED:
            return self
        return DenseMatrix(torch.ops.mkldnn._reorder_linear_weight(weight_NK, TYPICAL_ROWS))

    def linear(self, rows_RK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        if self.weight_NK.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise.default(rows_RK, self.weight_NK, bias_N, "none", [], "")
        return functional.linear(rows_RK, self.weight_NK, bias_N)

    def rows(self, ids_R: Tensor) -> Tensor:
        return functional.embedding(ids_R, self.weight_NK)

    def widened(self) -> Tensor:
        """Its values, [N, K]."""
        return self.weight_NK

    def tensors(self) -> list[Tensor]:
        return [self.weight_NK]


class StackedMatrix(Matrix):
    """Matrices of different formats one below the other, whose outputs follow each other."""

    def __init__(self, blocks: Sequence[Matrix]) -> None:
        self._blocks = list(blocks)
        self.shape = torch.Size((sum(map(len, blocks)), blocks[0].shape[1]))

    def __getitem__(self, outputs: slice) -> Matrix:
        first, last, _ = outputs.indices(len(self))
        ends = accumulate(map(len, self._blocks))
        found = [
            block[max(first - end + len(block), 0) : last - end + len(block)]
            for block, end in zip(self._blocks, ends, strict=True)
            if first < end and end - len(block) < last
        ]
        return found[0] if len(found) == 1 else StackedMatrix(found)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        raise TypeError("its blocks are filled one by one")

    def prepared(self, keeps_rows: bool = False) -> StackedMatrix:
        return StackedMatrix([block.prepared(keeps_rows) for block in self._blocks])

    def linear(self, rows_RK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        product_RN = torch.cat([block.linear(rows_RK) for block in self._blocks], 1)
        return product_RN if bias_N is None else product_RN.add_(bias_N)

    def rows(self, ids_R: Tensor) -> Tensor:
        raise TypeError("an embedding is one matrix")

    def tensors(self) -> list[Tensor]:
        return [tensor for block in self._blocks for tensor in block.tensors()]


class Products:
    """``Matrix.linear`` for the matrices of a stage.

    Attributes:
        pad_rows: pad products to ``PADDED_ROWS`` rows. Where a row of a product of at least that many does not depend on their
            number, as on the CPUs that were measured, the bits of an answer then do not depend on other requests.
    """

    def __init__(self) -> None:
        self.pad_rows = False

    def __call__(self, rows_RK: Tensor, matrix: Matrix, bias_N: Tensor | None = None) -> Tensor:
        if not self.pad_rows or (missing := PADDED_ROWS - rows_RK.shape[0]) <= 0:
            return matrix.linear(rows_RK, bias_N)
        return matrix.linear(functional.pad(rows_RK, (0, 0, 0, missing)), bias_N)[: rows_RK.shape[0]]
