"""A lane: what a stage keeps of one running request: its KV cache and a copy of its prediction trees.

Knows its own request only, and no model: the worker computes the rows of all lanes at once.
"""

from __future__ import annotations

from bisect import bisect_left

import torch

from pipedec.core import Opening, Step, Verdict
from pipedec.device import to_device
from pipedec.forest import ThreadChanges, forest_of
from pipedec.model import KVCache, LaneRows
from pipedec.threads import NewSequence
from pipedec.tree import Advance, is_mask


class Lane:
    """One request on one stage. In every timestep: ``sync`` if there is a verdict, then ``enter`` if it has rows.

    Args:
        new_sequence: makes the sequence of the answer.

    Attributes:
        cache: with the slots and the adopted rows that the opening names.
        forest: as far as the verdicts that were replayed.
        has_ended: whether rows that still arrive are void. Only the last stage knows that before the verdict returns to it.
    """

    has_ended = False

    def __init__(self, opening: Opening, new_sequence: NewSequence, cache: KVCache, device: torch.device | str) -> None:
        self.cache = cache
        self.forest = forest_of(new_sequence())
        self._prompt_length = opening.prompt_length
        self._prefill_length = opening.prompt_length + len(opening.said)
        self._has_masks = opening.tokens_per_mask > 0
        self._device = device

    @property
    def num_candidates(self) -> int:
        """Rows in the trees: neither accepted nor pruned."""
        return self.forest.num_rows

    def enter(self, step: Step) -> LaneRows:
        """Take in rows, which are computed next: chunks of the prompt and of what was said before, then rows of trees.

        Masks are the last rows. They may follow the last chunk; neither forest nor cache keeps these.
        """
        num_masks = int(is_mask(step.token_ids).sum()) if self._has_masks else 0
        first = self.cache.past_length
        if first < self._prefill_length:
            positions = torch.arange(first, first + step.num_rows, device=self._device)
            return LaneRows(positions, self.cache, None, self._prompt_length, num_masks)
        rows = self.forest.append(step.token_ids, step.parents, step.threads)
        positions, visibility = to_device(self.forest.positions[rows], self._device), self.forest.visibility(rows)
        return LaneRows(positions, self.cache, visibility.to(self._device), num_masks=num_masks)

    def sync(self, verdict: Verdict) -> tuple[Advance, ThreadChanges] | None:
        """Replay a verdict: commit and prune forest and cache. A verdict without tokens changes nothing.

        Returns:
            what became of the rows, and the effects on each thread; None if nothing has changed.
        """
        if not verdict.tokens:
            return None
        advance, changes, past = self.forest.advance(verdict)
        self.cache.advance(advance.committed, advance.kept)
        if past is not None:
            self.cache.release(past)
        return advance, changes

    def pruned(self, waiting: Step, advance: Advance) -> Step | None:
        """What ``advance`` has left of the rows that were the forest's newest before it, with parents as they are numbered now.

        Args:
            waiting: the rows, with their activations.

        Returns:
            None if no row is left.
        """
        assert waiting.hidden is not None
        first = advance.num_rows - waiting.num_rows
        kept = advance.kept[bisect_left(advance.kept.tolist(), first) :]
        if not kept.shape[0]:
            return None
        forest = self.forest
        rows = slice(forest.num_rows - kept.shape[0], forest.num_rows)
        threads = None if forest.threads is None else forest.threads[rows]
        return Step(forest.token_ids[rows], forest.parents[rows], waiting.hidden[kept - first], threads)
