"""Counts the draft tokens of a request, for its acceptance rate."""

from __future__ import annotations

import torch

from pipedec.core import Step

_STEPS_AT_ONCE = 64


class DraftTokens:
    """How many of the rows that entered the pipeline were draft tokens: neither roots, which are certain, nor mask rows.

    Many steps are counted at once, by the device that holds the rows, so that no timestep waits for the count.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | int = 0  # int64 [], of all steps but those in ``_steps``
        self._steps: list[Step] = []

    def count(self, step: Step) -> None:
        """``step`` enters the pipeline."""
        self._steps.append(step)
        if len(self._steps) == _STEPS_AT_ONCE:
            self._count()

    def total(self) -> int:
        """The draft tokens so far. Waits for the device."""
        if self._steps:
            self._count()
        return int(self._total)

    def _count(self) -> None:
        parents = torch.cat([step.parents for step in self._steps])
        token_ids = torch.cat([step.token_ids for step in self._steps])
        self._total = self._total + ((parents >= 0) & (token_ids >= 0)).sum()
        self._steps.clear()
