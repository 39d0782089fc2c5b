"""Attention over past and prediction tree as the paper writes it (Algorithm 1): what the fast one is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.tree import visible_slots


def reference_attention(
    q_RHD: Tensor,
    keys_KSD: Tensor,
    values_KSD: Tensor,
    past_length: int,
    mask_RN: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Paper Algorithm 1 as written: two score blocks, one softmax, two weighted sums. Slow."""
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


def _causal_mask(past_length: int, rows: int, window: int | None, device: torch.device) -> Tensor:
    """bool [R, S] for rows that directly follow the past, where slot numbers are positions."""
    positions_R1 = torch.arange(past_length, past_length + rows, device=device)[:, None]
    slots_S = torch.arange(past_length + rows, device=device)
    seen_RS = slots_S <= positions_R1
    return seen_RS if window is None else seen_RS & (slots_S > positions_R1 - window)
