"""Routed experts: each row of a layer passes through a few of its feed-forward networks.

A row's routing and the sum over its experts are the same in any company: every expert multiplies its rows by ``Products``, and
results are added in ascending order of the experts.
Shape legend: R rows, E hidden size, K experts of a row, P = R · K pairs of a row and an expert, in the order of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedec.formats import Format
from pipedec.model.matrices import Matrix, Products

UP = ("gate_up_proj", "up_proj")  # the names of an experts module of transformers for what a row enters by
DOWN = "down_proj"


class ExpertMatrices:
    """A matrix [N, K] for each expert, or some outputs of each.

    Attributes:
        format: of the matrices in the file.
        shape: [experts, N, K].
        is_transposed: whether the module has inputs before outputs, and so a file whose shapes do not show it.
    """

    def __init__(self, matrices: Sequence[Matrix], is_transposed: bool = False) -> None:
        self.matrices, self.is_transposed = list(matrices), is_transposed
        self.shape = torch.Size((len(self.matrices), *self.matrices[0].shape))

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
        num_read: experts that the last rows passed through.
    """

    def __init__(self, products: Products, matrices: Mapping[str, ExpertMatrices]) -> None:
        self._products, self.matrices = products, dict(matrices)
        self._up = next(name for name in UP if name in self.matrices)
        self.num_read = 0

    def __call__(self, module: Any, hidden_RE: Tensor, expert_ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        """The sum of each row's experts, [R, E]. ``module``: transformers' own, which has biases and the activation."""
        num_rows, top_k = expert_ids_RK.shape
        expert_ids_RK, by_expert = expert_ids_RK.sort(1)
        expert_ids_P, order_P = expert_ids_RK.flatten().sort(stable=True)
        read, counts = (found.tolist() for found in torch.unique_consecutive(expert_ids_P, return_counts=True))
        self.num_read = len(read)
        inner = self._multiplied(module, self._up, hidden_RE[order_P // top_k], expert_ids_P, read, counts)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        out_PE = self._multiplied(module, DOWN, inner, expert_ids_P, read, counts)
        if module.has_post_expert_norm:
            out_PE = module.post_expert_norm(out_PE)
        weighted_PE = out_PE * weights_RK.gather(1, by_expert).flatten()[order_P, None]
        weighted_RKE = torch.empty_like(weighted_PE, dtype=hidden_RE.dtype)
        weighted_RKE[order_P] = weighted_PE.to(hidden_RE.dtype)
        first_RE, *others = weighted_RKE.view(num_rows, top_k, -1).unbind(1)
        for other_RE in others:
            first_RE = first_RE + other_RE
        return first_RE

    def prepare(self) -> None:
        """Once the weights are in place."""
        for matrices in self.matrices.values():
            matrices.prepare()

    def tensors(self) -> list[Tensor]:
        return [tensor for matrices in self.matrices.values() for tensor in matrices.tensors()]

    def _multiplied(
        self, module: Any, name: str, rows: Tensor, expert_ids_P: Tensor, read: Sequence[int], counts: Sequence[int]
    ) -> Tensor:
        """Rows that are in the order of experts, by the matrices of those experts."""
        matrices = self.matrices[name].matrices
        parts = zip(read, rows.split(list(counts)), strict=True)
        product = torch.cat([self._products(part, matrices[expert]) for expert, part in parts])
        return product + getattr(module, f"{name}_bias")[expert_ids_P] if module.has_bias else product
