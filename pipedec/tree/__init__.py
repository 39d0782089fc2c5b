"""The dynamic prediction trees of an answer (PipeDec §3.3). Knows tensors, token ids and threads; no model and no process."""

from pipedec.tree.forest import (
    Forest,
    PastLabels,
    Remaining,
    ThreadChanges,
    ThreadedForest,
    apply_verdict,
    forest_of,
    position_root,
)
from pipedec.tree.growth import Frontier, Growth, Undrafted
from pipedec.tree.masks import Visibility, is_mask, mask_groups, visible_slots
from pipedec.tree.prediction_tree import Advance, Candidates, DraftRows, DraftTree, Gaps, PredictionTree, RowChanges

__all__ = [
    "Advance",
    "Candidates",
    "DraftRows",
    "DraftTree",
    "Forest",
    "Frontier",
    "Gaps",
    "Growth",
    "PastLabels",
    "PredictionTree",
    "Remaining",
    "RowChanges",
    "ThreadChanges",
    "ThreadedForest",
    "Undrafted",
    "Visibility",
    "apply_verdict",
    "forest_of",
    "is_mask",
    "mask_groups",
    "position_root",
    "visible_slots",
]  # fmt: skip
