"""Attention masks: the slots of the KV cache that ordinary rows and mask rows attend to (BiTA §3).

Mask rows stand for tokens that are not yet known, and predict the tokens after them. A *group* of M masks is a chain of rows
below an ordinary row. The m-th mask has the token id −m, and the position of the ordinary row plus m. It attends to everything
that row attends to, to the masks before it in its group, and to the learned prompt. Groups do not attend to each other, and no
ordinary row attends to a mask. Training and decoding share this module. It knows no tree and no thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.device import to_device


@dataclass(frozen=True)
class Visibility:
    """The attention mask of R rows over S cache slots: first the past, then the rows of all trees.

    Attributes:
        seen: bool [R, S − shared], ``[i, j]``: row i attends to slot ``shared`` + j.
        shared: number of leading slots that every row attends to: the whole past of an answer in one thread, else the prompt.
            The position id of each is its slot number.
        slot_positions: returns int64 [S − shared], position ids of the other slots; only sliding windows need them.
    """

    seen: Tensor
    shared: int
    slot_positions: Callable[[], Tensor]

    def to(self, device: torch.device | str) -> Visibility:
        """The mask on a device."""
        return Visibility(to_device(self.seen, device), self.shared, lambda: to_device(self.slot_positions(), device))

    def of(self, rows: slice, num_slots: int) -> Visibility:
        """The mask of some of the rows over the first ``num_slots`` slots."""
        return Visibility(self.seen[rows, : num_slots - self.shared], self.shared, self.slot_positions)


def is_mask(token_ids: Tensor) -> Tensor:
    """Which of ``token_ids`` (int64 [R]) are masks: bool [R]. Token ids of the vocabulary are never negative."""
    return token_ids < 0


def mask_groups(rows: Tensor, first: int, num_masks: int) -> tuple[Tensor, Tensor]:
    """One group of M masks below each of the tree's ``rows``, int64 [G], group after group. The first mask will be row ``first``.

    Returns:
        token_ids, parents: int64 [G · M], for ``PredictionTree.append``.
    """
    mask_rows = torch.arange(first, first + len(rows) * num_masks, device=rows.device).view(len(rows), num_masks)
    parents = torch.cat((rows[:, None], mask_rows[:, :-1]), 1) if num_masks else mask_rows
    token_ids = -torch.arange(1, num_masks + 1, device=rows.device).expand(len(rows), num_masks)
    return token_ids.flatten(), parents.flatten()


def visible_slots(tree_mask_RN: Tensor, is_mask_R: Tensor, num_prompt_tokens: int, past_length: int) -> Tensor:
    """The attention mask of rows of a tree (BiTA Figure 3).

    Args:
        tree_mask_RN: bool, each row's ancestors in the tree and the row itself (``PredictionTree.tree_mask``).
        is_mask_R: bool, which rows are masks.
        num_prompt_tokens: Q, number of tokens of the learned prompt.
        past_length: P, number of accepted tokens.

    Returns:
        bool [R, Q + P + N]: first the learned prompt (visible to masks only), then the past (visible to all), then the tree.
    """
    prompt_RQ = is_mask_R[:, None].expand(-1, num_prompt_tokens)
    past_RP = is_mask_R.new_ones(len(is_mask_R), past_length)
    return torch.cat((prompt_RQ, past_RP, tree_mask_RN), 1)
