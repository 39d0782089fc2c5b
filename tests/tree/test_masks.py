"""Mask rows in a tree."""

from __future__ import annotations

import torch

from pipedec.tree import PredictionTree, is_mask, mask_groups, visible_slots


def test_groups_follow_each_other_and_chain_inside() -> None:
    token_ids, parents = mask_groups(torch.tensor([0, 2]), 5, 3)
    assert token_ids.tolist() == [-1, -2, -3, -1, -2, -3]
    assert parents.tolist() == [0, 5, 6, 2, 8, 9]
    token_ids, parents = mask_groups(torch.tensor([1, 0]), 2, 1)
    assert (token_ids.tolist(), parents.tolist()) == ([-1, -1], [1, 0])


def test_no_rows_or_no_masks_give_no_groups() -> None:
    for rows, num_masks in ((torch.zeros(0, dtype=torch.int64), 3), (torch.tensor([0, 1]), 0)):
        token_ids, parents = mask_groups(rows, 2, num_masks)
        assert token_ids.dtype == parents.dtype == torch.int64
        assert (token_ids.tolist(), parents.tolist()) == ([], [])


def test_figure_3_of_the_paper() -> None:
    """Three prompt tokens, five of the sentence (one of them the root), three masks."""
    tree = PredictionTree()
    tree.reset(4)
    tree.plant(7)
    tree.append(*mask_groups(torch.tensor([0]), 1, 3))
    seen = visible_slots(tree.tree_mask, is_mask(tree.token_ids), 3, 4)
    rows = ["".join("01"[value] for value in row) for row in seen.tolist()]
    assert rows == ["000" "1111" "1000", "111" "1111" "1100", "111" "1111" "1110", "111" "1111" "1111"]  # fmt: skip
    assert tree.positions.tolist() == [4, 5, 6, 7]
