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
from pipedec.model.attention import AttentionPart, LaneRows, LayersShape, Rectangles, tree_attention

Placed = tuple[LaneRows, int]  # a lane, and the index of its first row in the forward


class FlashLaneAttention:
    """Attention of a forward's rows by a ``kernel`` with the arguments and results of ``flash_attn_varlen_func``.

    Mask rows, and rows of trees in layers with a sliding window, attend request by request: the kernel has no mask for them.
    """

    def __init__(self, lanes: Sequence[LaneRows], shape: LayersShape, kernel: Any) -> None:
        self._kernel, self._windows, self._pool = kernel, shape.windows, lanes[0].cache.pool
        placed = list(zip(lanes, accumulate((lane.num_rows for lane in lanes), initial=0), strict=False))
        chunks = [(lane, first) for lane, first in placed if lane.num_tokens and lane.visibility is None]
        trees = [(lane, first) for lane, first in placed if lane.num_tokens and lane.visibility is not None]
        with_past = [(lane, first) for lane, first in trees if lane.num_shared]
        self._chunks = PagedRows.of(chunks, [lane.cache.length + lane.num_tokens for lane, _ in chunks]) if chunks else None
        self._pasts = PagedRows.of(with_past, [lane.num_shared for lane, _ in with_past]) if with_past else None
        self._trees = TreeRows.of(with_past, shape.group, shape.dtype) if with_past else None
        self._parts = [AttentionPart.of_masks(lane, first, shape) for lane, first in placed if lane.num_masks]
        self._parts += [AttentionPart.of_tokens(lane, first, shape) for lane, first in trees if not lane.num_shared]
        windowed = with_past if any(window is not None for window in shape.windows) else []
        self._windowed = [AttentionPart.of_tokens(lane, first, shape) for lane, first in windowed]

    def attend(self, q_RHD: Tensor, layer: int) -> Tensor:
        window, out_RHD = self._windows[layer], q_RHD.new_empty(q_RHD.shape)
        if self._chunks is not None:
            out_RHD[self._chunks.rows], _ = self._chunks.attend(self._kernel, q_RHD, *self._pool.pages(layer), True, window)
        if self._trees is not None and self._pasts is not None and window is None:
            past = self._pasts.attend(self._kernel, q_RHD, *self._pool.pages(layer), False, None)
            out_RHD[self._pasts.rows] = merge_by_lse(*past, *self._trees.attend(q_RHD, self._pool.tensor[layer]))
        for part in self._parts if window is None else [*self._parts, *self._windowed]:
            out_RHD[part.rows] = tree_attention(q_RHD[part.rows], *part.reader(layer), part.plan, window)
        return out_RHD


@dataclass(frozen=True)
class PagedRows:
    """Rows of some requests that attend to the first slots of their caches, for a kernel that reads these block by block."""

    rows: Tensor  # int64 [T], indices into the forward's rows, request by request
    first_rows: Tensor  # int32 [B + 1], where each request's rows begin among ``rows``, and their number
    first_slots: Tensor  # int32 [B + 1], the same of slots
    most_rows: int  # of any request
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
        self, kernel: Any, q_RHD: Tensor, key_pages: Tensor, value_pages: Tensor, is_causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """out_THD, lse_TH. A causal mask is aligned to each request's last slot, as chunks after a past need.

        ``key_pages``, ``value_pages``: [blocks of the pool, block, K, D].
        """
        out_THD, lse_HT, _ = kernel(
            q_RHD[self.rows], key_pages, value_pages, self.first_rows, self.first_slots, self.most_rows, self.most_slots,
            causal=is_causal, window_size=(-1, -1) if window is None else (window - 1, 0), return_attn_probs=True,
            block_table=self.block_table,
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

    def attend(self, q_RHD: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
        """out_THD, lse_TH, over keys and values of the layer of all requests, ``cached``: [2, K, slots, D]."""
        rectangles, heads = self.rectangles, q_RHD.shape[1]
        folded = rectangles.folded(q_RHD, cached.shape[1])
        out, lse = attention_with_lse(folded, *rectangles.keys_values(cached), self.bias)
        return rectangles.unfolded(out, heads), rectangles.unfolded(lse[..., None], heads).squeeze(-1)


def attention_with_lse(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention in plain tensor operations that also returns the log-sum-exp of its scores.

    Args:
        queries: [..., K, R·G, D]: the heads that share a key-value head are rows.
        keys, values: [..., K, S, D].
        bias: added to the scores [..., K, R·G, S]; or None.

    Returns:
        out [..., K, R·G, D], lse [..., K, R·G] (in float32 or wider).
    """
    scores = queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores = scores + bias
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(values.dtype) @ values, lse


def merge_by_lse(out_a_RHD: Tensor, lse_a_RH: Tensor, out_b_RHD: Tensor, lse_b_RH: Tensor) -> Tensor:
    """Merge two attentions over disjoint keys into the one over all keys, weighting each by exp(lse)."""
    lse_RH = torch.logaddexp(lse_a_RH, lse_b_RH)
    share_a_RH1 = (lse_a_RH - lse_RH).exp()[..., None]
    share_b_RH1 = (lse_b_RH - lse_RH).exp()[..., None]
    return (out_a_RHD * share_a_RH1 + out_b_RHD * share_b_RH1).to(out_a_RHD.dtype)


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
