"""flash-attention in plain tensor operations, for CPUs: arguments and results of ``flash_attn.flash_attn_varlen_func``."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [blocks, block, K, D]
    v: Tensor,
    cu_seqlens_q: Tensor,  # int32 [B + 1]
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,  # int32 [B, blocks]
) -> tuple[Tensor, Tensor, None]:
    assert return_attn_probs and block_table is not None and block_table.shape[0] == len(cu_seqlens_q) - 1
    assert {cu_seqlens_q.dtype, cu_seqlens_k.dtype, block_table.dtype} == {torch.int32} and k.stride(-1) == v.stride(-1) == 1
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q and int(cu_seqlens_k.diff().max()) == max_seqlen_k
    assert int(cu_seqlens_q[-1]) == len(q) and int(cu_seqlens_k.diff().min()) > 0
    outs, lses = [], []
    for index, blocks in enumerate(block_table.tolist()):
        rows = q[cu_seqlens_q[index] : cu_seqlens_q[index + 1]]
        slots = int(cu_seqlens_k[index + 1] - cu_seqlens_k[index])
        keys, values = (pages[blocks].flatten(0, 1)[:slots].repeat_interleave(q.shape[1] // k.shape[2], 1) for pages in (k, v))
        scores = torch.einsum("rhd,shd->hrs", rows, keys) * q.shape[2] ** -0.5
        gap = torch.arange(slots - len(rows), slots)[:, None] - torch.arange(slots)  # how far behind its row each slot is
        reach = slots if window_size[0] < 0 else window_size[0]
        hidden = (gap < 0) | (gap > reach) if causal else torch.zeros_like(gap, dtype=torch.bool)
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hrs,shd->rhd", scores.softmax(-1), values))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1), None
