"""Attention of the rows of many requests with flash-attention: one call for all pasts, one for all prompt chunks.

The past of a tree's rows needs no mask, so a kernel with block tables reads it in place; the trees are gathered, padded to the
largest, and merged with it by the log-sum-exp of the scores. Knows blocks of the pool, but neither weights nor tokens.

Shapes as in ``attention`` and ``Rectangles``.
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
from pipedec.model.attention import (
    AttentionPart,
    LayersShape,
    Rectangles,
    attention_with_lse,
    beside_sinks,
    tree_attention,
)
from pipedec.model.cache import KVPool
from pipedec.model.rows import LaneRows

Placed = tuple[LaneRows, int]  # a lane, and the index of its first row in the forward


class FlashLaneAttention:
    """Attention of a forward's rows by a ``kernel`` with the arguments and results of ``flash_attn_varlen_func``.

    What the kernel has no mask for attends request by request: mask rows, rows of trees in layers with a reach, and chunks of
    prompts in layers that attend chunk by chunk. No layer caches latents.
    """

    def __init__(self, lanes: Sequence[LaneRows], shape: LayersShape, kernel: Any) -> None:
        self._kernel, self._layers, self._pool = kernel, shape.layers, lanes[0].cache.pool
        placed = list(zip(lanes, accumulate((lane.num_rows for lane in lanes), initial=0), strict=False))
        chunks = [(lane, first) for lane, first in placed if lane.num_tokens and lane.visibility is None]
        trees = [(lane, first) for lane, first in placed if lane.num_tokens and lane.visibility is not None]
        with_past = [(lane, first) for lane, first in trees if lane.num_shared]
        self._chunks = PagedRows.of(chunks, [lane.cache.length + lane.num_tokens for lane, _ in chunks]) if chunks else None
        self._pasts = PagedRows.of(with_past, [lane.num_shared for lane, _ in with_past]) if with_past else None
        groups = {layer.group for layer in shape.layers.values()} if with_past else ()
        self._trees = {group: TreeRows.of(with_past, group, shape.dtype) for group in groups}
        self._parts = [AttentionPart.of_masks(lane, first, shape) for lane, first in placed if lane.num_masks]
        self._parts += [AttentionPart.of_tokens(lane, first, shape) for lane, first in trees if not lane.num_shared]
        reaches = [layer.reach for layer in shape.layers.values() if layer.reach is not None]
        self._in_reach = [AttentionPart.of_tokens(lane, first, shape) for lane, first in with_past] if reaches else []
        in_chunks = any(reach.is_chunk for reach in reaches)
        self._in_chunks = [AttentionPart.of_tokens(lane, first, shape) for lane, first in chunks] if in_chunks else []

    def attend(self, q_RHD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        """See ``RowAttention``."""
        shape = self._layers[layer]
        reach, parts = shape.reach, list(self._parts)
        out_RHD = q_RHD.new_empty((*q_RHD.shape[:2], shape.value_dim))
        if reach is not None:
            parts += self._in_reach
        if reach is not None and reach.is_chunk:
            parts += self._in_chunks
        elif self._chunks is not None:
            out, lse = self._chunks.attend(self._kernel, q_RHD, self._pool.pages(layer), shape, is_causal=True)
            out_RHD[self._chunks.rows] = out if sinks_H is None else beside_sinks(out, lse, sinks_H)
        if self._pasts is not None and reach is None:
            past = self._pasts.attend(self._kernel, q_RHD, self._pool.pages(layer), shape, is_causal=False)
            out, lse = merge_by_lse(*past, *self._trees[shape.group].attend(q_RHD, self._pool, layer, shape))
            out_RHD[self._pasts.rows] = out if sinks_H is None else beside_sinks(out, lse, sinks_H)
        for part in parts:
            out_RHD[part.rows] = tree_attention(q_RHD[part.rows], *part.reader(layer), part.plan, shape, sinks_H)
        return out_RHD


@dataclass(frozen=True)
class PagedRows:
    """Rows of some requests that attend to the first slots of their caches, for a kernel that reads these block by block."""

    rows: Tensor  # int64 [T], indices into the forward's rows, request by request
    first_rows: Tensor  # int32 [B + 1], where each request's rows begin among ``rows``, and their number
    first_slots: Tensor  # int32 [B + 1], the same of slots
    most_rows: int  # those of the request with the most
    most_slots: int
    block_table: Tensor  # int32 [B, blocks], the pool's blocks of each request; padded with its first one

    @classmethod
    def of(cls, placed: Sequence[Placed], num_slots: Sequence[int]) -> PagedRows:
        """``num_slots``: how many leading slots of its cache each request's ordinary rows attend to, at least 1."""
        cache, device = placed[0][0].cache, placed[0][0].positions.device
        counts, block = [lane.num_tokens for lane, _ in placed], cache.pool.block
        width = -(-max(num_slots) // block)
        blocks = [lane.cache.blocks(count) for (lane, _), count in zip(placed, num_slots, strict=True)]
        return cls(
            to_device(torch.tensor([row for lane, first in placed for row in range(first, first + lane.num_tokens)]), device),
            _int32([*accumulate(counts, initial=0)], device), _int32([*accumulate(num_slots, initial=0)], device),
            max(counts), max(num_slots), _int32([[*own, *[own[0]] * (width - len(own))] for own in blocks], device),
        )  # fmt: skip

    def attend(
        self, kernel: Any, q_RHD: Tensor, pages: tuple[Tensor, Tensor], shape: LayerShape, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """out_THD, lse_TH. A causal mask is aligned to each request's last slot, as chunks after a past need.

        ``pages``: keys and values, each [blocks of the pool, block, K, D].
        """
        window = shape.reach.size if is_causal and shape.reach is not None else None
        out_THD, lse_HT, _ = kernel(
            q_RHD[self.rows], *pages, self.first_rows, self.first_slots, self.most_rows, self.most_slots,
            softmax_scale=shape.scale, causal=is_causal, window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=shape.softcap or 0.0, return_attn_probs=True, block_table=self.block_table,
        )  # fmt: skip
        return out_THD, lse_HT.transpose(0, 1)


@dataclass(frozen=True)
class TreeRows:
    """Rows of some requests' trees, and the slots after those that all rows of a request see, padded to rectangles."""

    rectangles: Rectangles
    bias: Tensor  # [B, 1, M·G, N], 0 or −inf, for the folded queries

    @classmethod
    def of(cls, placed: Sequence[Placed], group: int, dtype: torch.dtype) -> TreeRows:
        device, seen = placed[0][0].positions.device, [lane.visibility_of_tokens().seen for lane, _ in placed]
        rows = [range(first, first + lane.num_tokens) for lane, first in placed]
        slots = [lane.cache.ranges(lane.num_shared, lane.num_shared + mask.shape[1])
                 for (lane, _), mask in zip(placed, seen, strict=True)]  # fmt: skip
        rectangles = Rectangles.of(rows, slots, device)
        bias = torch.zeros(*rectangles.rows.shape, group, rectangles.slots.shape[1], dtype=dtype, device=device)
        for of_lane, mask in zip(bias, seen, strict=True):
            of_lane[:, :, mask.shape[1] :] = -torch.inf
            of_lane[: mask.shape[0], :, : mask.shape[1]].masked_fill_(~mask[:, None], -torch.inf)
        return cls(rectangles, bias.flatten(1, 2)[:, None])

    def attend(self, q_RHD: Tensor, pool: KVPool, layer: int, shape: LayerShape) -> tuple[Tensor, Tensor]:
        """out_THD, lse_TH, in a layer of this shape."""
        rectangles, heads = self.rectangles, q_RHD.shape[1]
        keys, values = pool.gathered(layer, rectangles.slots)
        out, lse = attention_with_lse(rectangles.folded(q_RHD, keys.shape[1]), keys, values, self.bias, shape)
        return rectangles.unfolded(out, heads), rectangles.unfolded(lse[..., None], heads).squeeze(-1)


def merge_by_lse(out_a_RHD: Tensor, lse_a_RH: Tensor, out_b_RHD: Tensor, lse_b_RH: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attentions over disjoint keys into the one over all keys, weighting each by exp(lse): out_RHD, lse_RH."""
    lse_RH = torch.logaddexp(lse_a_RH, lse_b_RH)
    share_a_RH1 = (lse_a_RH - lse_RH).exp()[..., None]
    share_b_RH1 = (lse_b_RH - lse_RH).exp()[..., None]
    return (out_a_RHD * share_a_RH1 + out_b_RHD * share_b_RH1).to(out_a_RHD.dtype), lse_RH


def _int32(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.int32), device)


@cache
def flash_attention() -> Any:
    """``flash_attn_varlen_func``, or None if the package is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    return importlib.import_module("flash_attn").flash_attn_varlen_func


def flash_kernel(dtype: torch.dtype, device: torch.device) -> tuple[Any, str]:
    """``flash_attn_varlen_func`` if uncaptured forwards use it in layers without a sliding window, else None; and the reason."""
    if device.type != "cuda":
        return None, "flash-attention needs CUDA"
    if dtype not in (torch.float16, torch.bfloat16):
        return None, "flash-attention needs 16 bits"
    if flash_attention() is None:
        return None, "the package flash-attn is not installed"
    return flash_attention(), "flash-attn is installed"


def described_attention(dtype: torch.dtype, device: torch.device, captures: bool) -> tuple[str, str]:
    """The kernel of layers without a sliding window, and the reason for it, for users. ``captures``: whether forwards of few
    rows are captured on a GPU.
    """
    kernel, why = flash_kernel(dtype, device)
    name = "SDPA" if kernel is None else "flash-attention"
    return name, f"{why}; SDPA in CUDA graphs for few rows" if captures and device.type == "cuda" else why
