"""What the methods of a run have let enter, and what of it was accepted: counters that only grow.

Counting asks nothing of a device; reading ``mask_rows`` may wait for it.
"""

from __future__ import annotations

import torch

from pipedec.core import Step

POSITIONS = 16  # below a root, of which accepted tokens are told apart


class Tally:
    """Counts for all requests of a run.

    Attributes:
        rows: all that have entered.
        prompt_rows: tokens of prompts, and of answers that go on behind a pause.
        root_rows: certain tokens.
        drafts: those of them that entered when nothing of their thread was in flight.
        accepted_tokens: guesses that were accepted.
        pauses: how often a request was paused.
        corrupted: requests that ended because a stage computed NaN or infinity.
        accepted_per_pos: the same by depth below the root that entered, from 1; deeper ones than ``POSITIONS`` are left out.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.prompt_rows = 0
        self.root_rows = 0
        self.drafts = 0
        self.accepted_tokens = 0
        self.pauses = 0
        self.corrupted = 0
        self.accepted_per_pos = [0] * POSITIONS
        self._mask_rows = 0
        self._with_masks: list[torch.Tensor] = []  # token ids of steps whose masks are not counted yet

    @property
    def mask_rows(self) -> int:
        """Masks that have entered."""
        if self._with_masks:
            self._mask_rows += int((torch.cat(self._with_masks) < 0).sum())
            self._with_masks.clear()
        return self._mask_rows

    @property
    def draft_rows(self) -> int:
        """Guesses that have entered."""
        return self.rows - self.prompt_rows - self.root_rows - self.mask_rows

    def enter(self, step: Step, prompt_rows: int, has_masks: bool) -> None:
        """A step enters whose first ``prompt_rows`` rows are text."""
        self.rows += step.num_rows
        self.prompt_rows += prompt_rows
        if has_masks:
            self._with_masks.append(step.token_ids)

    def enter_roots(self, drafts: int, others: int) -> None:
        """Among the rows that enter are these roots; see ``drafts``."""
        self.root_rows += drafts + others
        self.drafts += drafts

    def accept(self, depth: int, tokens: int) -> None:
        """Guesses are accepted: ``tokens`` of them behind one that was ``depth`` below its root."""
        self.accepted_tokens += tokens
        for position in range(depth, min(depth + tokens, POSITIONS)):
            self.accepted_per_pos[position] += 1
