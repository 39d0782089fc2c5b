"""Mask rows (BiTA §3): rows of the tree that stand for tokens not yet known, and predict the tokens after them.

A *group* of M masks hangs behind a row: the m-th mask has the id −m, stands m positions behind that row, and sees what the row
sees, the masks before it in its group, and the learned prompt. Groups do not see each other, and no ordinary row sees a mask.
Training and decoding take rows and visibility from here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_mask(token_ids: Tensor) -> Tensor:
    """bool [R]: which of ``token_ids`` (int64 [R]) are masks. Tokens of a vocabulary are never negative."""
    return token_ids < 0


def mask_groups(rows: Tensor, first: int, num_masks: int) -> tuple[Tensor, Tensor]:
    """A group of masks behind each of ``rows``, group after group.

    Args:
        rows: int64 [G], rows of a tree.
        first: the row at which the first mask will stand.

    Returns:
        token_ids, parents: int64 [G · M], for ``PredictionTree.append``.
    """
    places = torch.arange(first, first + len(rows) * num_masks, device=rows.device).view(len(rows), num_masks)
    parents = torch.cat((rows[:, None], places[:, :-1]), 1) if num_masks else places
    token_ids = -torch.arange(1, num_masks + 1, device=rows.device).expand(len(rows), num_masks)
    return token_ids.flatten(), parents.flatten()


def visible_slots(tree_mask_RN: Tensor, is_mask_R: Tensor, num_prompt_tokens: int, past_length: int) -> Tensor:
    """What rows of a tree may attend to (BiTA Figure 3).

    Args:
        tree_mask_RN: bool, each row's ancestors in the tree and itself (``PredictionTree.tree_mask``).
        is_mask_R: bool.
        num_prompt_tokens: Q, tokens of the learned prompt.
        past_length: P, accepted tokens.

    Returns:
        bool [R, Q + P + N]: the learned prompt, for masks alone; the past, for all; then the tree.
    """
    prompt_RQ = is_mask_R[:, None].expand(-1, num_prompt_tokens)
    past_RP = is_mask_R.new_ones(len(is_mask_R), past_length)
    return torch.cat((prompt_RQ, past_RP, tree_mask_RN), 1)
