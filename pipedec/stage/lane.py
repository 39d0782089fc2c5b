"""A lane: what a stage keeps of one running request: its KV cache and a copy of its prediction trees.

Knows its own request only, and no model: the worker computes the rows of all lanes at once.
"""

from __future__ import annotations

from bisect import bisect_left

import torch

from pipedec.core import Opening, SlotRuns, Step, Verdict
from pipedec.device import to_device
from pipedec.forest import Forest, ThreadChanges
from pipedec.model import KVCache, LaneRows
from pipedec.threads import NewSequence
from pipedec.tree import Advance, is_mask


class Lane:
    """One request on one stage. In every timestep: ``sync`` if there is a verdict, then ``enter`` if it has rows.

    Args:
        new_sequence: makes the sequence of the answer.
        cache: with the slots and the adopted rows that the opening names.
    """

    def __init__(self, opening: Opening, new_sequence: NewSequence, cache: KVCache, device: torch.device | str) -> None:
        self._prompt_length = opening.prompt_length
        self._prefill_length = opening.prompt_length + len(opening.said)
        self._has_masks = opening.tokens_per_mask > 0
        self._forest = Forest(new_sequence())
        self._cache = cache
        self._device = device

    @property
    def has_ended(self) -> bool:
        """Whether rows that still arrive are void. Only the last stage knows that before the verdict returns to it."""
        return False

    @property
    def num_cached(self) -> int:
        """Number of rows in the cache."""
        return self._cache.length

    @property
    def num_candidates(self) -> int:
        """Rows in the trees: neither accepted nor pruned."""
        return self._forest.num_rows

    def extend(self, slots: SlotRuns) -> None:
        """Add slots for rows behind those for which there are any."""
        self._cache.extend(slots)

    def enter(self, step: Step) -> LaneRows:
        """Take in rows, which are computed next: chunks of the prompt and of what was said before, then rows of trees.

        Masks may follow the last chunk; neither forest nor cache keeps these.
        """
        num_masks = self._count_masks(step)
        if self._cache.past_length < self._prefill_length:
            first = self._cache.past_length
            positions = torch.arange(first, first + step.num_rows, device=self._device)
            return LaneRows(positions, self._cache, None, self._prompt_length, num_masks)
        rows = self._forest.append(step.token_ids, step.parents, step.threads)
        positions, visibility = to_device(self._forest.positions[rows], self._device), self._forest.visibility(rows)
        return LaneRows(positions, self._cache, visibility.to(self._device), num_masks=num_masks)

    def sync(self, verdict: Verdict) -> Advance | None:
        """Replay a verdict: commit and prune forest and cache. A verdict without tokens changes nothing.

        Returns:
            what became of the rows; None if nothing has changed.
        """
        if not verdict.tokens:
            return None
        advance, changes = self._forest.advance(verdict)
        self._replay(advance, changes)
        return advance

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
        if not len(kept):
            return None
        forest = self._forest
        rows = slice(forest.num_rows - len(kept), forest.num_rows)
        threads = None if forest.threads is None else forest.threads[rows]
        hidden = waiting.hidden[kept - first]
        return Step(forest.token_ids[rows].clone(), forest.parents[rows].clone(), hidden, threads)

    def _count_masks(self, step: Step) -> int:
        """The number of masks in a step, which are its last rows."""
        return int(is_mask(step.token_ids).sum()) if self._has_masks else 0

    def _replay(self, advance: Advance, changes: ThreadChanges) -> None:
        """Apply the forest's changes to the cache."""
        self._cache.advance(advance.committed, advance.kept)
        if changes.affects_threads and (kept := self._forest.release()) is not None:
            self._cache.release(kept)
