"""Which rows of a tree see which: the part of the draft model's attention mask that depends on a tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipedec.tree import DraftTree


def ancestor_mask(tree: DraftTree, rows: Sequence[int], in_slots: Sequence[int]) -> Tensor:
    """Which of the rows in slots, and then of ``rows`` themselves, each of ``rows`` descends from, or is.

    Args:
        in_slots: the row in each of N slots.

    Returns:
        bool [F, N + F], on the host.
    """
    columns = {row: column for column, row in enumerate((*in_slots, *rows))}
    seen = np.zeros((len(rows), len(columns)), dtype=np.bool_)
    for line, row in zip(seen, rows, strict=True):
        line[[columns[above] for above in tree.ancestors_of(row)]] = True
    return torch.from_numpy(seen)
