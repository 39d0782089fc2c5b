"""The draft model's state for one running request: a cache, and which rows of the request's trees are in it.

Knows no other request. Data that changes by a few rows at a time is kept on the host. Shapes: N tree slots of the cache, C
accepted tokens that were never drafted, F rows to draft, R = C + F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pipedec.core import SlotRuns
from pipedec.device import to_device
from pipedec.drafting.masks import ancestor_mask
from pipedec.drafting.thread_labels import ThreadLabels
from pipedec.grammar import Bitmask
from pipedec.model import LaneRows
from pipedec.model.cache import KVCache
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import DraftRows, RowChanges, Visibility

Row = tuple[int, int]  # thread, and row of its tree


@dataclass(frozen=True)
class Entering:
    """Rows of one request that enter a forward of the draft model.

    Attributes:
        token_ids: of the R rows.
        drafted: the rows of trees, which are the last F of the rows.
    """

    token_ids: list[int]
    rows: LaneRows
    drafted: list[Row]


class DraftLane:
    """The tree slots of its cache are in order of drafting.

    Args:
        cache: with the slots and the adopted rows of the request's lease.

    Accepted rows that were never drafted form the *chain* of their thread, which the next forward computes together with its
    rows. If there are several threads, the last tokens of joined threads are never computed, and a chain attends to the present
    context when it is computed: drafts need not be exact.
    """

    def __init__(self, cache: KVCache, sequence: ThreadSequence, device: torch.device) -> None:
        self._cache = cache
        self._added: list[int] = []  # tokens that have joined the past, in order, as long as there is only one thread
        self._device = device
        self._sequence = sequence
        self._slots: dict[Row, int] = {}  # tree slot of each row that was drafted, ascending
        self._chains: dict[int, list[int]] = {}  # by thread: token ids that follow the past
        self._labels = ThreadLabels(sequence) if sequence.can_fork else None

    @property
    def num_cached(self) -> int:
        """Rows in the cache."""
        return self._cache.length

    @property
    def num_chained(self) -> int:
        """Rows that the next forward computes in addition to the requested ones."""
        return sum(map(len, self._chains.values()))

    def allowed(self, requested: DraftRows) -> list[Bitmask]:
        """The tokens that the answer's structure allows after each of the rows; empty without a structure."""
        grammar, tree = self._sequence.grammar, requested.tree
        if grammar is None:
            return []
        return [grammar.allowed(tree.tokens_of(tree.ancestors_of(row)[-2::-1])) for row in requested.rows]

    def extend(self, slots: SlotRuns) -> None:
        """Add slots of the pool."""
        self._cache.extend(slots)

    def take_added(self) -> list[int]:
        """The tokens that have joined the past since the last call; with several threads, those of the prompt."""
        added, self._added = self._added, []
        return added

    def enter_prompt(self, token_ids: Sequence[int]) -> Entering:
        """The next chunk of the prompt for a forward."""
        rows = LaneRows(self._after_past(len(token_ids)), self._cache, prefill_length=self._sequence.prompt_length)
        self._added += token_ids
        return Entering(list(token_ids), rows, [])

    def enter(self, requested: Sequence[DraftRows]) -> Entering:
        """The chains and then ``requested`` for a forward. Call ``settle`` afterwards.

        Raises:
            ValueError: rows of a tree are not ascending, one was drafted before, or an ancestor was not and is not among them.
        """
        for entry in requested:
            self._check(entry)
        drafted = [(entry.thread, row) for entry in requested for row in entry.rows]
        token_ids = [token for chain in self._chains.values() for token in chain]
        token_ids += [token for entry in requested for token in entry.tree.tokens_of(entry.rows)]
        if self._labels is None:
            positions, visibility = self._visibility(requested[0])
        else:
            positions, visibility = self._labels.enter(self._chains, requested, list(self._slots))
        rows = LaneRows(to_device(positions, self._device), self._cache, visibility.to(self._device))
        return Entering(token_ids, rows, drafted)

    def settle(self, entered: Entering) -> None:
        """Finish a forward with these rows of ``enter``: the chains join the past, the drafted rows the tree slots."""
        first, chained = len(self._slots), entered.rows.num_rows - len(entered.drafted)
        if chained:
            self._join(entered.token_ids[:chained])
            slots = torch.arange(self._cache.tree_length)
            self._cache.advance(slots[first : first + chained], torch.cat((slots[:first], slots[first + chained :])))
        self._chains = {}
        self._slots.update(zip(entered.drafted, range(first, first + len(entered.drafted)), strict=True))

    def advance(self, thread: int, changes: RowChanges) -> None:
        """Commit and prune cache entries in the same way as the thread's tree."""
        kept_rows = {row: number for number, row in enumerate(changes.kept)}
        committed = [self._slots.get((thread, row)) for row in changes.committed]
        drafted = [slot for slot in committed if slot is not None]
        chain = [token for slot, token in zip(committed, changes.committed_ids, strict=True) if slot is None]
        kept = [(row, slot) for row, slot in self._slots.items() if row[0] != thread or row[1] in kept_rows]
        if self._labels is not None:
            own = {slot for row, slot in self._slots.items() if row[0] == thread}
            dropped = sorted(own - {slot for _, slot in kept})
            self._labels.advance(thread, _tensor(drafted), _tensor(dropped))
        if self._slots:
            self._join(changes.committed_ids[: len(drafted)])
            self._cache.advance(_tensor(drafted), _tensor([slot for _, slot in kept]))
        rows = ((thread, kept_rows[row]) if of_thread == thread else (of_thread, row) for (of_thread, row), _ in kept)
        self._slots = {row: slot for slot, row in enumerate(rows)}
        if chain:
            self._chains[thread] = self._chains.get(thread, []) + chain

    def _join(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the answer to the past."""
        if self._labels is None:
            self._added += token_ids

    def threads_changed(self) -> None:
        """Follow threads that were opened, joined or ended."""
        if self._labels is None:
            return
        for number in self._sequence.released():
            self._chains.pop(number, None)
        kept = self._labels.threads_changed()
        if kept is not None:
            self._cache.release(kept)

    def _after_past(self, num_rows: int) -> Tensor:
        """int64 [num_rows], the position ids directly after the past."""
        first = self._cache.past_length
        return torch.arange(first, first + num_rows, device=self._device)

    def _visibility(self, requested: DraftRows) -> tuple[Tensor, Visibility]:
        """Positions and attention mask of chain and rows for an answer that cannot fork."""
        tree, past = requested.tree, self._cache.past_length
        chained = len(self._chains.get(requested.thread, ()))
        positions = [*range(past, past + chained), *tree.positions_of(requested.rows)]
        in_slots = [row for _, row in self._slots]
        seen = ancestor_mask(tree, requested.rows, in_slots)
        if chained:  # no row below the chain has been drafted yet: there are no tree slots
            of_rows, seen = seen, torch.ones(len(positions), len(positions), dtype=torch.bool).tril_()
            seen[chained:, chained:] = of_rows
        slot_positions = [*tree.positions_of(in_slots), *positions]
        return _tensor(positions), Visibility(seen, past, lambda: _tensor(slot_positions))

    def _check(self, requested: DraftRows) -> None:
        thread, rows = requested.thread, requested.rows
        if any(after <= before for before, after in pairwise(rows)):
            raise ValueError("rows to draft must be in ascending order")
        if any((thread, row) in self._slots for row in rows):
            raise ValueError("rows must not be drafted twice")
        entering = set(rows)
        for row in rows:
            parent = requested.tree.ancestors_of(row)[1:2]
            if not all(above in entering or (thread, above) in self._slots for above in parent):
                raise ValueError("rows must be drafted after their ancestors")


def _tensor(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
