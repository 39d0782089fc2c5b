"""Routed experts: each row of a layer passes through a few of its feed-forward networks.

A row's routing and the sum over its experts are the same in any company: an expert's products are, and results are added in
ascending order of the experts. On a GPU one launch multiplies for all experts, and no number is read on the host.
Shape legend: R rows, E hidden size, K experts of a row, P = R · K pairs of a row and an expert, in the order of experts; X
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pipedec.core.limits import KERNEL_ROWS
from pipedec.formats import Format
from pipedec.model.formats.base import QuantizedMatrix
from pipedec.model.kernels.language import has_kernels
from pipedec.model.kernels.matmul import Weights, grouped_matmul, plain_weights
from pipedec.model.matrices import DenseMatrix, Matrix, Products

UP = ("gate_up_proj", "up_proj")  # the names of an experts module of transformers for what a row enters by
DOWN = "down_proj"

Multiply = Callable[[str, Tensor], Tensor]  # rows in the order of experts by the matrices of a parameter of those experts


class ExpertMatrices:
    """A matrix [N, K] for each expert, or some outputs of each.

    Attributes:
        format: of the matrices in the file.
        shape: [experts, N, K].
        is_transposed: whether the module has inputs before outputs, and so a file whose shapes do not show it.

    Args:
        whole: the matrices one below the other, if they are views of one, [experts · N, K].
    """

    def __init__(self, matrices: Sequence[Matrix], is_transposed: bool = False, whole: Matrix | None = None) -> None:
        self.matrices, self.is_transposed, self._whole = list(matrices), is_transposed, whole
        self.shape = torch.Size((len(self.matrices), *self.matrices[0].shape))

    @classmethod
    def of(cls, whole: Matrix, experts: int, is_transposed: bool = False) -> ExpertMatrices:
        """Views of one matrix."""
        return cls(whole.split([len(whole) // experts] * experts), is_transposed, whole)

    def stored(self) -> Weights | None:
        """All matrices for kernels, once the weights are in place; None if they are not in one memory."""
        whole, experts = self._whole, len(self.matrices)
        if isinstance(whole, QuantizedMatrix):
            return whole.stored().of_experts(experts)
        return plain_weights(whole.weight_NK).of_experts(experts) if isinstance(whole, DenseMatrix) else None

    @property
    def format(self) -> Format:
        return self.matrices[0].format

    def __getitem__(self, outputs: slice) -> ExpertMatrices:
        return ExpertMatrices([matrix[outputs] for matrix in self.matrices], self.is_transposed)

    def prepare(self) -> None:
        """See ``Matrix.prepared``."""
        self.matrices = [matrix.prepared() for matrix in self.matrices]

    def tensors(self) -> list[Tensor]:
        return [tensor for matrix in self.matrices for tensor in matrix.tensors()]


class Experts:
    """The experts of a layer.

    Attributes:
        matrices: by the names of the module's parameters.
        num_read: experts that the last rows passed through; on a GPU, and in captured forwards, int64 [] on the device.
    """

    def __init__(self, products: Products, matrices: Mapping[str, ExpertMatrices]) -> None:
        self._products, self.matrices = products, dict(matrices)
        self._up = next(name for name in UP if name in self.matrices)
        self.num_read: int | Tensor = 0

    def __call__(
        self, module: Any, hidden_RE: Tensor, expert_ids_RK: Tensor, weights_RK: Tensor, num_rows: Tensor | None = None
    ) -> Tensor:
        """The sum of each row's experts, [R, E].

        Args:
            module: transformers' own, which has biases and the activation.
            num_rows: int32 [1], of a captured forward: how many of the rows, the first ones, are not padding.
        """
        rows, top_k = expert_ids_RK.shape
        expert_ids_RK, by_expert = expert_ids_RK.sort(1)
        if num_rows is not None:  # padding passes through an expert that there is not
            is_row_R = torch.arange(rows, device=num_rows.device) < num_rows
            expert_ids_RK = torch.where(is_row_R[:, None], expert_ids_RK, self.num_experts)
        expert_ids_P, order_P = expert_ids_RK.flatten().sort(stable=True)
        multiply = self._multiply(expert_ids_P, num_rows is not None)
        biased_P = expert_ids_P if num_rows is None else expert_ids_P.clamp(max=self.num_experts - 1)
        inner = _biased(module, self._up, multiply(self._up, hidden_RE[order_P // top_k]), biased_P)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        out_PE = _biased(module, DOWN, multiply(DOWN, inner), biased_P)
        if module.has_post_expert_norm:
            out_PE = module.post_expert_norm(out_PE)
        weighted_PE = out_PE * weights_RK.gather(1, by_expert).flatten()[order_P, None]
        weighted_RKE = torch.empty_like(weighted_PE, dtype=hidden_RE.dtype)
        weighted_RKE[order_P] = weighted_PE.to(hidden_RE.dtype)
        first_RE, *others = weighted_RKE.view(rows, top_k, -1).unbind(1)
        for other_RE in others:
            first_RE = first_RE + other_RE
        return first_RE

    def prepare(self) -> None:
        """Once the weights are in place."""
        for matrices in self.matrices.values():
            matrices.prepare()

    def tensors(self) -> list[Tensor]:
        return [tensor for matrices in self.matrices.values() for tensor in matrices.tensors()]

    @property
    def num_experts(self) -> int:
        return self.matrices[DOWN].shape[0]

    @property
    def can_group(self) -> bool:
        """Whether one launch can multiply for all experts, once the weights are in place."""
        return len(self._stored) == len(self.matrices)

    @cached_property
    def _stored(self) -> dict[str, Weights]:
        """The matrices that kernels can read, as they lie in memory."""
        found = {name: matrices.stored() for name, matrices in self.matrices.items()}
        return {name: weights for name, weights in found.items() if weights is not None}

    def _multiply(self, expert_ids_P: Tensor, is_captured: bool) -> Multiply:
        """For pairs in the order of experts; ``num_experts`` for pairs of padding, of which there are none unless captured."""
        if has_kernels(expert_ids_P.device) and self.can_group:
            return self._by_kernels(expert_ids_P)
        return self._by_all(expert_ids_P) if is_captured else self._by_parts(expert_ids_P)

    def _by_parts(self, expert_ids_P: Tensor) -> Multiply:
        """Expert by expert, of those that there are pairs of."""
        read, counts = (found.tolist() for found in torch.unique_consecutive(expert_ids_P, return_counts=True))
        self.num_read = len(read)

        def multiply(name: str, rows: Tensor) -> Tensor:
            parts, matrices = zip(read, rows.split(counts), strict=True), self.matrices[name].matrices
            return torch.cat([self._products(part, matrices[expert]) for expert, part in parts])

        return multiply

    def _by_all(self, expert_ids_P: Tensor) -> Multiply:
        """Every pair by every expert, of which only its own counts: the reference of ``_by_kernels``."""
        self.num_read = (counts_of(expert_ids_P, self.num_experts) > 0).sum()

        def multiply(name: str, rows: Tensor) -> Tensor:
            products = (self._products(rows, matrix) for matrix in self.matrices[name].matrices)
            found = rows.new_zeros(len(rows), self.matrices[name].shape[1])
            for expert, product in enumerate(products):
                found = torch.where((expert_ids_P == expert)[:, None], product, found)
            return found

        return multiply

    def _by_kernels(self, expert_ids_P: Tensor) -> Multiply:
        """All experts in one launch."""
        counts_X = counts_of(expert_ids_P, self.num_experts)
        self.num_read = (counts_X > 0).sum()
        tile_rows = rows_of_tile(len(expert_ids_P), self.num_experts)
        tiles_T3 = tiles_of(counts_X, len(expert_ids_P), tile_rows)
        return lambda name, rows: grouped_matmul(rows, self._stored[name], tiles_T3, tile_rows)


def counts_of(expert_ids_P: Tensor, experts: int) -> Tensor:
    """int64 [X], the pairs of each expert; those of ``experts`` are padding."""
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=expert_ids_P.device)
    return counts.scatter_add_(0, expert_ids_P, torch.ones_like(expert_ids_P))[:experts]


def rows_of_tile(pairs: int, experts: int) -> int:
    """Pairs of a tile: 16, unless there are so many that most experts have more."""
    return next((rows for rows in (16, 32) if pairs <= rows * experts), KERNEL_ROWS)


def tiles_of(counts_X: Tensor, pairs: int, tile_rows: int) -> Tensor:
    """int32 [T, 3], the tiles of pairs in the order of experts (see ``grouped_matmul``). T depends on shapes alone.

    Args:
        counts_X: int64, the pairs of each expert.
        pairs: P, padding included.
    """
    experts = len(counts_X)
    tiles_T = torch.arange(pairs // tile_rows + min(experts, pairs), device=counts_X.device)
    ends_X = (counts_X + tile_rows - 1).div(tile_rows, rounding_mode="floor").cumsum(0)  # of the tiles of each expert
    expert_T = torch.searchsorted(ends_X, tiles_T, right=True)
    own_T = expert_T.clamp(max=experts - 1)
    first_T = (tiles_T - torch.cat((ends_X.new_zeros(1), ends_X))[own_T]) * tile_rows  # among the expert's pairs
    rows_T = counts_X.cumsum(0)[own_T] - counts_X[own_T] + first_T
    count_T = (counts_X[own_T] - first_T).clamp(0, tile_rows)
    return torch.stack((torch.where(expert_T < experts, own_T, -1), rows_T, count_T), 1).to(torch.int32)


def _biased(module: Any, name: str, product: Tensor, expert_ids_P: Tensor) -> Tensor:
    return product + getattr(module, f"{name}_bias")[expert_ids_P] if module.has_bias else product
