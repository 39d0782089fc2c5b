"""What the draft model keeps for one running request: a cache, and which rows of the request's trees are in it.

Knows no other request. Shapes: N tree slots of the cache, C accepted tokens that were never drafted, F rows to draft, R = C + F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.drafting.thread_labels import ThreadLabels
from pipedec.model import LaneRows
from pipedec.model.cache import KVCache
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Advance, DraftRows, PredictionTree, Visibility


@dataclass(frozen=True)
class Entering:
    """Rows of one request that enter a forward of the draft model.

    Attributes:
        token_ids: int64 [R].
        drafted: int64 [F], rows of trees, which are the last of the rows.
    """

    token_ids: Tensor
    rows: LaneRows
    drafted: Tensor


class DraftLane:
    """The tree slots of its cache are in order of drafting.

    Accepted rows that were never drafted form the *chain* of their thread, which the next forward computes together with its
    rows. If there are several threads, the last tokens of joined threads are never computed, and a chain attends to the context
    as it is when it is computed: drafts need not be exact.
    """

    def __init__(self, cache: KVCache, sequence: ThreadSequence, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._sequence = sequence
        self._slot_rows = torch.zeros(0, dtype=torch.int64, device=device)  # [N], the row of its tree in every tree slot
        self._chains: dict[int, Tensor] = {}  # by thread: int64, token ids that follow the past
        self._labels = ThreadLabels(sequence, device) if sequence.can_fork else None

    def close(self) -> None:
        """Give the cache back."""
        self._cache.close()

    def enter_prompt(self, token_ids: Tensor) -> Entering:
        """The next chunk of the prompt (int64 [any number]) for a forward."""
        positions = self._positions_after_past(len(token_ids))
        return Entering(token_ids, LaneRows(positions, self._cache, prefill_length=self._sequence.prompt_length), token_ids[:0])

    def enter(self, requested: Sequence[DraftRows]) -> Entering:
        """The chains and then ``requested`` for a forward. Call ``settle`` behind it.

        Raises:
            ValueError: rows of a tree are not ascending, one was drafted before, or an ancestor was not and is not among them.
        """
        for entry in requested:
            self._check(entry.tree, self._slot_rows[self._slots_of(entry.thread)], entry.rows)
        rows = torch.cat([entry.rows for entry in requested])
        token_ids = torch.cat([*self._chains.values(), *(entry.tree.token_ids[entry.rows] for entry in requested)])
        if self._labels is None:
            positions, visibility = self._visibility(requested[0])
        else:
            positions, visibility = self._labels.enter(self._chains, requested, self._slot_rows)
        return Entering(token_ids, LaneRows(positions, self._cache, visibility), rows)

    def settle(self, entered: Entering) -> None:
        """The forward with these rows of ``enter`` is done: the chains join the past, the drafted rows the tree slots."""
        drafted = entered.drafted
        first, chained = len(self._slot_rows), entered.rows.num_rows - len(drafted)
        if chained:
            slots = torch.arange(self._cache.tree_length, device=self._device)
            self._cache.advance(slots[first : first + chained], torch.cat((slots[:first], slots[first + chained :])))
        self._chains = {}
        self._slot_rows = torch.cat((self._slot_rows, drafted))

    def advance(self, thread: int, advance: Advance) -> None:
        """Commit and prune cache entries as the thread's tree was."""
        own = self._slots_of(thread)
        rows = self._slot_rows[own]
        slots = torch.full((advance.num_rows,), -1, dtype=torch.int64, device=self._device)
        slots[rows] = own
        committed = slots[advance.committed]
        is_drafted = committed >= 0
        drafted, chain = committed[is_drafted], advance.committed_ids[~is_drafted]
        is_kept, new_rows = advance.renumber(rows)
        kept = own[is_kept]
        self._slot_rows[kept] = new_rows
        if self._labels is not None:
            kept = self._labels.advance(thread, drafted, own[~is_kept])
        self._slot_rows = self._slot_rows[kept]
        self._cache.advance(drafted, kept)
        if len(chain):
            self._chains[thread] = torch.cat((self._chains.get(thread, chain[:0]), chain))

    def threads_changed(self) -> None:
        """To be called when threads were opened, joined or ended."""
        if self._labels is None:
            return
        for number in self._sequence.released():
            self._chains.pop(number, None)
        kept = self._labels.threads_changed()
        if kept is not None:
            self._cache.release(kept)

    def _positions_after_past(self, num_rows: int) -> Tensor:
        """int64 [num_rows], the position ids directly after the past."""
        first = self._cache.past_length
        return torch.arange(first, first + num_rows, device=self._device)

    def _slots_of(self, number: int) -> Tensor:
        """int64, ascending, the tree slots that hold rows of a thread's tree."""
        return torch.arange(len(self._slot_rows), device=self._device) if self._labels is None else self._labels.slots_of(number)

    def _visibility(self, requested: DraftRows) -> tuple[Tensor, Visibility]:
        """Positions and attention mask of chain and rows for an answer that cannot fork."""
        number, tree, rows = requested.thread, requested.tree, requested.rows
        chained = len(self._chains.get(number, ()))
        slot_rows = self._slot_rows
        positions = torch.cat((self._positions_after_past(chained), tree.positions[rows]))
        mask = tree.tree_mask[rows][:, torch.cat((slot_rows, rows))]
        if chained:  # no row below the chain has been drafted yet: there are no tree slots
            tree_mask, mask = mask, mask.new_ones((len(positions), len(positions))).tril()
            mask[chained:, chained:] = tree_mask
        return positions, Visibility(mask, self._cache.past_length, lambda: torch.cat((tree.positions[slot_rows], positions)))

    def _check(self, tree: PredictionTree, drafted: Tensor, rows: Tensor) -> None:
        if bool((rows.diff() <= 0).any()):
            raise ValueError("rows to draft must be in ascending order")
        is_drafted = torch.zeros(tree.num_rows, dtype=torch.bool, device=self._device)
        is_drafted[drafted] = True
        if bool(is_drafted[rows].any()):
            raise ValueError("rows must not be drafted twice")
        is_drafted[rows] = True
        if bool((tree.tree_mask[rows] & ~is_drafted).any()):
            raise ValueError("rows must be drafted after their ancestors")
