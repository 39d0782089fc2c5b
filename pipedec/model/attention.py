"""Attention over the accepted past and the prediction tree (paper Algorithm 1), for CPU and CUDA.

The scores over past and tree share one softmax; the past needs no mask. Knows tensors only, neither cache nor model.

Shape legend: R rows in this step, P past tokens, N tree slots including this step's rows, S = P + N, H query heads,
K key-value heads, G = H / K, D head size, E hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.tree import Visibility, visible_slots

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class LayersShape:
    """Shape and type of a stage's layers, as far as attention depends on them.

    Attributes:
        windows: their sliding windows, None for a layer without one.
        group: G, query heads per key-value head.
        hidden_size: E.
        dtype: of activations, keys and values.
    """

    windows: tuple[int | None, ...]
    group: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionPlan:
    """The masks of one step, prepared once and used by every layer.

    Attributes:
        is_prefill: the rows directly follow the past and attend to each other causally.
        biases: for each sliding window, the tensor that is added to the scores, 0 or −inf: [R, S] in prefill (None = plain causal
            attention from slot 0), else [R·G, S] for the folded queries (None = all slots are seen).
    """

    is_prefill: bool
    biases: dict[int | None, Tensor | None]

    @classmethod
    def for_prefill(
        cls, past_length: int, rows: int, windows: Iterable[int | None], dtype: torch.dtype, device: torch.device
    ) -> AttentionPlan:
        """For a chunk of the prompt, directly behind the past."""
        biases: dict[int | None, Tensor | None] = {}
        for window in set(windows):
            if window is None and past_length == 0:
                biases[window] = None
                continue
            seen_RS = _causal_mask(past_length, rows, window, device)
            biases[window] = torch.zeros(seen_RS.shape, dtype=dtype, device=device).masked_fill_(~seen_RS, -torch.inf)
        return cls(True, biases)

    @classmethod
    def for_tree(
        cls,
        visibility: Visibility,
        positions_R: Tensor,
        windows: Iterable[int | None],
        group: int,
        dtype: torch.dtype,
        prompt_length: int | None = None,
    ) -> AttentionPlan:
        """For rows of prediction trees.

        Args:
            visibility: the slots that each row attends to.
            positions_R: int64 position ids of the rows.
            windows: the sliding windows of the layers, None for a layer without one.
            group: G.
            prompt_length: for mask rows (BiTA): length Q of the learned prompt in front of the keys. It has no positions and is
                in every window. None for ordinary rows.
        """
        num_prompt_slots, shared, device = prompt_length or 0, visibility.shared, positions_R.device
        biases: dict[int | None, Tensor | None] = {}
        for window in set(windows):
            seen = visibility.seen
            # A single row that sees all needs no bias, as in plain decoding. A GPU is not asked: it would have to be waited for.
            if window is None and seen.shape[0] == 1 and seen.device == _HOST and bool(seen.all()):
                biases[window] = None
                continue
            bias = torch.zeros(seen.shape[0], group, num_prompt_slots + shared + seen.shape[1], dtype=dtype, device=device)
            if window is not None:
                near_RS = in_window(visibility, positions_R, window)
                seen = seen & near_RS[:, shared:]
                bias[:, :, num_prompt_slots : num_prompt_slots + shared].masked_fill_(~near_RS[:, None, :shared], -torch.inf)
            bias[:, :, num_prompt_slots + shared :].masked_fill_(~seen[:, None], -torch.inf)
            biases[window] = bias.flatten(0, 1)
        return cls(False, biases)


def in_window(visibility: Visibility, positions_R: Tensor, window: int) -> Tensor:
    """bool [R, S]: the slots whose positions are among the last ``window`` up to the row's own."""
    shared_positions = torch.arange(visibility.shared, device=positions_R.device)
    positions_S = torch.cat((shared_positions, visibility.slot_positions()[: visibility.seen.shape[1]]))
    return positions_S > positions_R[:, None] - window


def tree_attention(q_RHD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, plan: AttentionPlan, window: int | None) -> Tensor:
    """Attention of a step's rows over past and tree (paper Algorithm 1).

    Args:
        q_RHD: rotated queries.
        keys_KSD: rotated keys of past, tree and this step's rows.
        values_KSD: values of the same slots.
        plan: the plan of this step; its windows include ``window``.
        window: the layer's sliding window, or None.

    Returns:
        out_RHD.
    """
    rows, heads, head_dim = q_RHD.shape
    kv_heads, slots, _ = keys_KSD.shape
    group, bias = heads // kv_heads, plan.biases[window]
    if plan.is_prefill:  # key-value heads are the batch: all share one [R, S] bias, and keys are expanded without a copy
        queries = q_RHD.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        keys = keys_KSD[:, None].expand(kv_heads, group, slots, head_dim)
        values = values_KSD[:, None].expand(kv_heads, group, slots, head_dim)
        out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, is_causal=bias is None)
        return out.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)
    # The queries are folded to [1, K, R·G, D]: heads that share a key-value head become rows, so that keys need not be repeated.
    folded = q_RHD.view(rows, kv_heads, group, head_dim).transpose(0, 1).reshape(1, kv_heads, rows * group, head_dim)
    out = functional.scaled_dot_product_attention(folded, keys_KSD[None], values_KSD[None], attn_mask=bias)
    return out.view(kv_heads, rows, group, head_dim).transpose(0, 1).reshape(rows, heads, head_dim)


def reference_attention(
    q_RHD: Tensor,
    keys_KSD: Tensor,
    values_KSD: Tensor,
    past_length: int,
    mask_RN: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Paper Algorithm 1 as written: two score blocks, one softmax, two weighted sums. Slow; a reference for tests."""
    rows, heads, head_dim = q_RHD.shape
    group = heads // keys_KSD.shape[0]
    keys_HSD, values_HSD = keys_KSD.repeat_interleave(group, 0), values_KSD.repeat_interleave(group, 0)
    if mask_RN is None:
        seen_RS = _causal_mask(past_length, rows, window, q_RHD.device)
    else:
        seen_RS = visible_slots(mask_RN, mask_RN.new_zeros(rows), 0, past_length)
        seen_RS &= _slots_in_window(mask_RN, 0, past_length, window or keys_KSD.shape[1] + 1)
    scores_HRS = torch.einsum("rhd,hsd->hrs", q_RHD, keys_HSD) / head_dim**0.5
    past_HRP = scores_HRS[:, :, :past_length].masked_fill(~seen_RS[:, :past_length], -torch.inf)
    tree_HRN = scores_HRS[:, :, past_length:].masked_fill(~seen_RS[:, past_length:], -torch.inf)
    probs_HRS = torch.cat((past_HRP, tree_HRN), dim=-1).softmax(-1)
    out_past = torch.einsum("hrp,hpd->rhd", probs_HRS[:, :, :past_length], values_HSD[:, :past_length])
    out_tree = torch.einsum("hrn,hnd->rhd", probs_HRS[:, :, past_length:], values_HSD[:, past_length:])
    return out_past + out_tree


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


def _causal_mask(past_length: int, rows: int, window: int | None, device: torch.device) -> Tensor:
    """bool [R, S] for rows that directly follow the past, where slot numbers are positions."""
    positions_R1 = torch.arange(past_length, past_length + rows, device=device)[:, None]
    slots_S = torch.arange(past_length + rows, device=device)
    seen_RS = slots_S <= positions_R1
    return seen_RS if window is None else seen_RS & (slots_S > positions_R1 - window)


def _slots_in_window(mask_RN: Tensor, prompt_length: int, past_length: int, window: int) -> Tensor:
    """bool [R, Q + P + N]: the slots within the last ``window`` positions, each tree row's own included.

    The number of a past slot is its position. A path has one tree row per position and rows enter after their parents, so the
    distance from a row to a marked ancestor is the number of marks to the right of it. The learned prompt has no positions and
    is always in the window.
    """
    depth_R1 = mask_RN.sum(1, keepdim=True)
    tree_RN = depth_R1 - mask_RN.cumsum(1) < window
    slots_P = torch.arange(past_length, device=mask_RN.device)
    past_RP = slots_P > past_length + depth_R1 - 1 - window
    return torch.cat((mask_RN.new_ones(len(mask_RN), prompt_length), past_RP, tree_RN), dim=1)


@cache
def flash_attention() -> Any:
    """``flash_attn_varlen_func``, or None if the package is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    return importlib.import_module("flash_attn").flash_attn_varlen_func


def flash_kernel(dtype: torch.dtype, device: torch.device) -> Any:
    """``flash_attn_varlen_func`` where it is what forwards use that are not captured, else None."""
    return flash_attention() if attention_backend(dtype, device)[0] == "flash-attention" else None


def described_attention(dtype: torch.dtype, device: torch.device, captures: bool) -> tuple[str, str]:
    """The kernel of layers without a sliding window, and why it is that one, for users.

    Args:
        captures: forwards on a GPU are captured if they have few rows.
    """
    name, why = attention_backend(dtype, device)
    return name, f"{why}; SDPA in CUDA graphs for few rows" if captures and device.type == "cuda" else why


def attention_backend(dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """The kernel of layers without a sliding window in a forward that is not captured, and why it is that one."""
    if device.type != "cuda":
        return "SDPA", "flash-attention needs CUDA"
    if dtype not in (torch.float16, torch.bfloat16):
        return "SDPA", "flash-attention needs 16 bits"
    if flash_attention() is None:
        return "SDPA", "the package flash-attn is not installed"
    return "flash-attention", "flash-attn is installed"
