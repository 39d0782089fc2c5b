"""Counts the draft tokens of a request, for its acceptance rate."""

from __future__ import annotations

import torch

from pipedec.core import Step


class DraftTokens:
    """How many of the rows that entered the pipeline were draft tokens: neither roots, which are certain, nor mask rows.

    The counting is done by the device that holds the rows, so that no timestep waits for it.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._others: torch.Tensor | int = 0  # roots and mask rows: int64 []

    def add(self, step: Step | None) -> Step | None:
        """Count the rows of ``step`` and return it."""
        if step is not None:
            self._rows += step.num_rows
            self._others = self._others + ((step.parents < 0) | (step.token_ids < 0)).sum()
        return step

    def total(self) -> int:
        """The draft tokens so far. Waits for the device."""
        return self._rows - int(self._others)
