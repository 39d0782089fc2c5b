"""The dynamic prediction tree (PipeDec §3.3). Knows tensors and token ids; knows no model, no process, no Redis."""

from pipedec.tree.masks import Visibility, is_mask, mask_groups, visible_slots
from pipedec.tree.prediction_tree import (
    Advance,
    Candidates,
    DraftRows,
    DraftTree,
    Gaps,
    PredictionTree,
    RootedTree,
    RowChanges,
)

__all__ = [
    "Advance", "Candidates", "DraftRows", "DraftTree", "Gaps", "PredictionTree", "RootedTree", "RowChanges", "Visibility",
    "is_mask", "mask_groups", "visible_slots",
]  # fmt: skip
