"""Matrices of weights in the order in which the CPU's kernels read them (oneDNN's blocked layout), and products with them.

A packed matrix takes as much memory as before. A product with few rows then takes as long as reading the matrix once, which
``functional.linear`` is far from between 2 and 64 rows. Knows nothing of layers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

TYPICAL_ROWS = 16  # the layout is chosen for products of this many rows
SMALLEST_PACKED = 192 * 192  # numbers; below, a call of the packed kernel costs more than it saves


def pack(weight: Tensor) -> Tensor:
    """A matrix [outputs, inputs] for ``linear``: packed if this pays on its device, else as it is.

    A packed one has the layout ``torch._mkldnn``: nothing but ``linear`` takes it.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS) if pays(weight) else weight


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows · weightᵀ (+ bias), for a weight that ``pack`` returned."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return functional.linear(rows, weight, bias)


def pays(weight: Tensor) -> bool:
    """Whether ``pack`` changes this matrix."""
    supported = weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    return supported and weight.numel() >= SMALLEST_PACKED
