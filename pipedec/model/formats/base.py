"""Common to all matrices in fewer bits: tensors by output, and products with them.

Kernels read the numbers as they are: on a GPU those of ``model.kernels``, on a processor torch's, where it has one. Elsewhere
slices are widened to the type of the activations, small enough to stay in a processor's cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.formats import WIDENED_VALUES, Format
from pipedec.model.kernels.language import has_kernels
from pipedec.model.kernels.matmul import Weights, matmul
from pipedec.model.matrices import Matrix

SLICE_VALUES = {"cpu": 1 << 19, "cuda": WIDENED_VALUES}  # widened at once
LOADED_VALUES = {"cpu": 1 << 19, "cuda": 1 << 22}  # rounded or unpacked at once

Kernel = Callable[[Tensor], Tensor]
Held = Mapping[str, Tensor]


class QuantizedMatrix(Matrix):
    """A matrix [N, K] in fewer bits.

    Attributes:
        dtype: of the activations.
        held: the tensors in memory by name, one row for ``steps`` outputs each.
        steps: outputs that share a row, if not 1; 0 for a tensor that all outputs share.

    ``empty`` makes one; the constructor takes tensors that are there.
    """

    steps: Mapping[str, int] = {}

    def __init__(self, format: Format, shape: tuple[int, int], dtype: torch.dtype, held: Held) -> None:
        self.format, self.shape, self.dtype, self.held = format, torch.Size(shape), dtype, dict(held)
        self._kernel: Kernel | None = None
        self._stored: Weights | None = None
        self._parts: list[QuantizedMatrix] = []

    @classmethod
    @abstractmethod
    def empty(cls, format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A matrix without values. Raises UserError if its sizes do not suit the format."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.held.values())).device

    def __getitem__(self, outputs: slice) -> Self:
        first, last, _ = outputs.indices(len(self))
        held = {name: tensor[self._rows_of(name, first, last)] for name, tensor in self.held.items()}
        return type(self)(self.format, (last - first, self.shape[1]), self.dtype, held)

    def _rows_of(self, name: str, first: int, last: int) -> slice:
        step = self.steps.get(name, 1)
        if step == 0:
            return slice(None)
        assert first % step == 0, f"{name}: outputs from {first} on"
        return slice(first // step, -(-last // step))

    def linear(self, rows_RK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        if has_kernels(rows_RK.device, rows_RK.dtype):
            self._stored = self._stored or self.stored()
            return matmul(rows_RK, self._stored, bias_N)
        if self._kernel is not None:
            product_RN = self._kernel(rows_RK)
        else:
            self._parts = self._parts or list(self.slices(SLICE_VALUES))  # views, whose making costs as much as a small product
            parts = [part.product(rows_RK) for part in self._parts]
            product_RN = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return product_RN if bias_N is None else product_RN.add_(bias_N)

    @abstractmethod
    def stored(self) -> Weights:
        """The matrix for kernels, once its weights are in place; of as many matrices one below the other, for experts."""

    def takes_torch_kernel(self, keeps_rows: bool) -> bool:
        """Whether it may be prepared for a kernel of torch, if there is one for it: in bfloat16 on a processor."""
        is_on_cpu = self.device.type == "cpu" and not has_kernels(self.device)
        return is_on_cpu and self.dtype == torch.bfloat16 and not keeps_rows

    def product(self, rows_RK: Tensor) -> Tensor:
        """rows · matrixᵀ, [R, N], with the whole matrix widened."""
        return functional.linear(rows_RK, self.widened().to(rows_RK.dtype))

    def rows(self, ids_R: Tensor) -> Tensor:
        steps = {name: self.steps.get(name, 1) for name in self.held}
        chosen = {
            name: tensor if steps[name] == 0 else tensor.index_select(0, ids_R // steps[name])
            for name, tensor in self.held.items()
        }
        return self.values(chosen).to(self.dtype)

    def widened(self) -> Tensor:
        """The values of the format, float32 [N, K]."""
        held = {
            name: tensor.repeat_interleave(step, 0)[: len(self)] if (step := self.steps.get(name, 1)) > 1 else tensor
            for name, tensor in self.held.items()
        }
        return self.values(held)

    @abstractmethod
    def values(self, held: Held) -> Tensor:
        """float32 [n, K], from tensors with a row for each of n outputs, apart from those that all share."""

    def tensors(self) -> list[Tensor]:
        return list(self.held.values())

    def slices(self, num_values: Mapping[str, int]) -> Iterator[Self]:
        """Views of consecutive outputs with about this many values each, by the type of the device."""
        step = max(num_values[self.device.type] // self.shape[1] // self.format.step, 1) * self.format.step
        return (self[start : start + step] for start in range(0, len(self), step))
