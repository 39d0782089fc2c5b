"""Attention on the CPU without a copy of keys and values for each query head that shares them.

transformers repeats keys and values where there is a mask, so that no GPU falls back to a slow kernel. On a CPU the repeating
takes longer than the attention. Owns only this choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

_NAME = "grouped_sdpa"


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Let a transformers model on the CPU, if its attention is PyTorch's, compute it grouped."""
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        yield
        return
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def _grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None, **others: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: queries [B, heads, K, D], keys and values [B, heads that share them, S, D]."""
    found = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _grouped)
