"""A lane: what a stage keeps of one running request: its KV cache, a copy of its prediction trees, and the output not sent yet.

Knows its own request only, and no model: the worker computes the rows of all lanes at once.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from pipedec.core import Opening, SlotRuns, Step, Verdict
from pipedec.device import to_device
from pipedec.forest import Forest, ThreadChanges
from pipedec.model import KVCache, LaneRows
from pipedec.threads import NewSequence
from pipedec.tree import Advance, is_mask


class Lane:
    """One request on one stage. In every timestep: ``sync`` if there is a verdict; ``enter``, then ``computed`` if it has rows.

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
        self._pending: Step | None = None  # a prefill chunk, or the newest rows of the forest

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
        self._pending = step
        if self._cache.past_length < self._prefill_length:
            first = self._cache.past_length
            positions = torch.arange(first, first + step.num_rows, device=self._device)
            return LaneRows(positions, self._cache, None, self._prompt_length, num_masks)
        rows = self._forest.append(step.token_ids, step.parents, step.threads)
        positions, visibility = to_device(self._forest.positions[rows], self._device), self._forest.visibility(rows)
        return LaneRows(positions, self._cache, visibility.to(self._device), num_masks=num_masks)

    def computed(self, hidden_RE: Tensor) -> None:
        """Keep the activations of the rows that entered last until ``outgoing``."""
        entered = self._pending
        assert entered is not None
        self._pending = Step(entered.token_ids, entered.parents, hidden_RE, entered.threads)

    def sync(self, verdict: Verdict) -> int:
        """Replay a verdict: commit and prune forest, cache and pending output. A verdict without tokens changes nothing.

        Returns:
            the number of rows that were pruned.
        """
        if not verdict.tokens:
            return 0
        advance, changes = self._forest.advance(verdict)
        self._replay(advance, changes)
        return advance.num_rows - len(advance.committed) - len(advance.kept)

    def outgoing(self) -> Step | None:
        """Take the pending output, with parents as the next stage's trees will number them; None if no row is left."""
        pending, self._pending = self._pending, None
        return pending if pending is not None and pending.num_rows else None

    def _count_masks(self, step: Step) -> int:
        """The number of masks in a step, which are its last rows."""
        return int(is_mask(step.token_ids).sum()) if self._has_masks else 0

    def _replay(self, advance: Advance, changes: ThreadChanges) -> None:
        """Apply the forest's changes to the cache and to the pending output."""
        self._cache.advance(advance.committed, advance.kept)
        if changes.affects_threads and (kept := self._forest.release()) is not None:
            self._cache.release(kept)
        if self._pending is not None:
            self._prune(self._pending, advance)

    def _prune(self, pending: Step, advance: Advance) -> None:
        """Drop pending rows that the forest has dropped; those that are left are its newest, numbered anew."""
        assert pending.hidden is not None
        first = advance.num_rows - pending.num_rows
        kept = advance.kept[bisect_left(advance.kept.tolist(), first) :]
        forest = self._forest
        rows = slice(forest.num_rows - len(kept), forest.num_rows)
        threads = None if forest.threads is None else forest.threads[rows]
        hidden = pending.hidden[kept - first]
        self._pending = Step(forest.token_ids[rows].clone(), forest.parents[rows].clone(), hidden, threads)
