"""Attention of chunks of prompts with flash-attention, which reads the pool's blocks in place: one call for all requests.

Knows blocks of the pool, but neither weights nor tokens. Shapes as in ``attention``; B requests.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pipedec.device import to_device
from pipedec.families import LayerShape
from pipedec.model.attention import LayersShape, beside_sinks
from pipedec.model.kernels.language import has_kernels
from pipedec.model.rows import LaneRows


class FlashLaneAttention:
    """Attention of chunks of prompts by a ``kernel`` with the arguments and results of ``flash_attn_varlen_func``."""

    def __init__(self, lanes: Sequence[LaneRows], shape: LayersShape, kernel: Any) -> None:
        self._kernel, self._layers, self._pool = kernel, shape.layers, lanes[0].cache.pool
        self._chunks = PagedRows.of(lanes)

    @staticmethod
    def suits(lanes: Sequence[LaneRows]) -> bool:
        """Whether all rows are of prompts."""
        return all(lane.visibility is None and not lane.num_masks for lane in lanes)

    def attend(self, q_RHD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        """See ``RowAttention``."""
        out, lse = self._chunks.attend(self._kernel, q_RHD, self._pool.pages(layer), self._layers[layer])
        return out if sinks_H is None else beside_sinks(out, lse, sinks_H)


@dataclass(frozen=True)
class PagedRows:
    """Rows of some requests that follow each other's pasts directly, for a kernel that reads caches block by block."""

    first_rows: Tensor  # int32 [B + 1], where each request's rows begin, and their number
    first_slots: Tensor  # int32 [B + 1], the same of slots
    most_rows: int  # those of the request with the most
    most_slots: int
    block_table: Tensor  # int32 [B, blocks], the pool's blocks of each request; padded with its first one

    @classmethod
    def of(cls, lanes: Sequence[LaneRows]) -> PagedRows:
        device, block = lanes[0].positions.device, lanes[0].cache.pool.block
        counts, slots = [lane.num_rows for lane in lanes], [lane.cache.length + lane.num_rows for lane in lanes]
        width = -(-max(slots) // block)
        blocks = [lane.cache.blocks(count) for lane, count in zip(lanes, slots, strict=True)]
        return cls(
            _int32([*accumulate(counts, initial=0)], device), _int32([*accumulate(slots, initial=0)], device),
            max(counts), max(slots), _int32([[*own, *[own[0]] * (width - len(own))] for own in blocks], device),
        )  # fmt: skip

    def attend(self, kernel: Any, q_RHD: Tensor, pages: tuple[Tensor, Tensor], shape: LayerShape) -> tuple[Tensor, Tensor]:
        """out_RHD, lse_RH. The causal mask is aligned to each request's last slot.

        ``pages``: keys and values, each [blocks of the pool, block, K, D].
        """
        window = None if shape.reach is None else shape.reach.size
        out_RHD, lse_HR, _ = kernel(
            q_RHD, *pages, self.first_rows, self.first_slots, self.most_rows, self.most_slots,
            softmax_scale=shape.scale, causal=True, window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=shape.softcap or 0.0, return_attn_probs=True, block_table=self.block_table,
        )  # fmt: skip
        return out_RHD, lse_HR.transpose(0, 1)


def _int32(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.int32), device)


@cache
def flash_attention() -> Any:
    """``flash_attn_varlen_func``, or None if the package is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    return importlib.import_module("flash_attn").flash_attn_varlen_func


def flash_kernel(dtype: torch.dtype, device: torch.device) -> tuple[Any, str]:
    """``flash_attn_varlen_func`` for prompts, else None; and the reason."""
    if device.type != "cuda":
        return None, "flash-attention needs CUDA"
    if dtype not in (torch.float16, torch.bfloat16):
        return None, "flash-attention needs 16 bits"
    if flash_attention() is None:
        return None, "the package flash-attn is not installed"
    return flash_attention(), "flash-attn is installed"


def described_attention(dtype: torch.dtype, device: torch.device, why_kernels: str) -> tuple[str, str]:
    """The way in which attention is computed, and the reason for it, for users. ``why_kernels``: from ``choose_kernels``."""
    name, (flash, why_flash) = "Triton" if has_kernels(device) else "SDPA", flash_kernel(dtype, device)
    if flash is not None:
        return f"{name}, flash-attention for prompts", why_kernels
    return name, f"{why_kernels}; {why_flash}" if device.type == "cuda" else why_kernels
