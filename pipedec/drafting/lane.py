"""The draft model's state for one running request: a cache, and which rows of the request's trees are in it.

Knows no other request. Data that changes by a few rows at a time is kept on the host. Shapes: N tree slots of the cache, C
accepted tokens that were never drafted, F rows to draft, R = C + F, P slots of the past after the prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from pipedec.device import to_device
from pipedec.drafting.growing import Forward, GrowingTree, RowsAhead
from pipedec.grammar import Bitmask
from pipedec.model import LaneRows
from pipedec.model.cache import KVCache
from pipedec.sampling import TokenPredictor
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, DraftTree, RowChanges, Visibility
from pipedec.tree.forest import UNSEEN, PastLabels

_CHAINED = -1  # replaces the row of a token that is in no tree
Row = tuple[int, int]  # thread, and row of its tree


@dataclass(frozen=True)
class Entering:
    """Rows of one request that enter a forward of the draft model."""

    token_ids: list[int]  # what the R rows hold
    rows: LaneRows
    drafted: list[Row]  # the rows of trees, which are the last F of the rows


class DraftLane:
    """Owns a cache, which begins with the rows adopted by the request's lease. Its tree slots are in order of drafting.

    Accepted tokens that were never drafted form the *chain* of their thread, which the next forward computes together with its
    rows. With several threads, drafts are not exact: the last tokens of joined threads are never computed, and a chain attends to
    the context at the time of its forward.
    """

    def __init__(self, cache: KVCache, sequence: ThreadSequence, device: torch.device, predictor: TokenPredictor | None) -> None:
        self.cache = cache
        self._predictor = predictor  # None if it would change nothing
        self._added: list[int] = []  # tokens that have joined the past, in order, as long as there is only one thread
        self._device = device
        self._sequence = sequence
        self._slots: dict[Row, int] = {}  # tree slot of each row that was drafted, ascending
        self._chains: dict[int, list[int]] = {}  # by thread: token ids that follow the past
        self._labels = _ThreadLabels(sequence) if sequence.can_fork else None
        self._ahead = RowsAhead((), ())

    @property
    def next_length(self) -> int:
        """The length of the cache after a forward over the chains alone."""
        self._forget_ahead()
        return self.cache.length + sum(map(len, self._chains.values()))

    def has_ahead(self, requested: DraftRows) -> bool:
        """Whether rows were drafted ahead."""
        return self._ahead.places_of(requested) is not None

    @property
    def can_go_ahead(self) -> bool:
        """Whether nothing but the draft's distribution decides what is drafted, in one thread."""
        return self._predictor is None and self._sequence.grammar is None and self._labels is None

    def allowed(self, requested: DraftRows) -> list[Bitmask]:
        """The tokens that the answer's structure allows after each of the rows; empty without a structure."""
        grammar, tree = self._sequence.grammar, requested.tree
        if grammar is None:
            return []
        return [grammar.allowed(tree.tokens_of(tree.ancestors_of(row)[-2::-1])) for row in requested.rows]

    def predicted(self, requested: DraftRows, log_probs_RV: Tensor) -> Tensor:
        """The logarithms of the probabilities that the request chooses each token after each of the rows, [R, V], from those of
        the draft's distribution.
        """
        if self._predictor is None:
            return log_probs_RV
        stream = self._sequence.threads[requested.thread].noise_stream
        return self._predictor.log_probs(log_probs_RV, requested.tree.next_positions_of(requested.rows), stream)

    def take_added(self) -> list[int]:
        """The tokens that have joined the past since the last call; with several threads, only those of the prompt."""
        added, self._added = self._added, []
        return added

    def enter_prompt(self, token_ids: Sequence[int]) -> Entering:
        """The rows of the prompt's next chunk, for a forward. Then call ``settle_prompt``."""
        first = self.cache.past_length
        positions = torch.arange(first, first + len(token_ids), device=self._device)
        return Entering(list(token_ids), LaneRows(positions, self.cache, prefill_length=self._sequence.prompt_length), [])

    def enter(self, requested: Sequence[DraftRows]) -> Entering:
        """The chains and then ``requested``, for a forward. Then call ``settle``. Raises ValueError as ``DraftModel.expand``."""
        for entry in requested:
            self._check(entry)
        drafted = [(entry.thread, row) for entry in requested for row in entry.rows]
        token_ids = [token for chain in self._chains.values() for token in chain]
        token_ids += [token for entry in requested for token in entry.tree.tokens_of(entry.rows)]
        if self._labels is None:
            positions, visibility = self._visibility(requested[0])
        else:
            positions, visibility = self._labels.enter(self._chains, requested, list(self._slots))
        rows = LaneRows(to_device(positions, self._device), self.cache, visibility)
        return Entering(token_ids, rows, drafted)

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

    def _visibility(self, requested: DraftRows) -> tuple[Tensor, Visibility]:
        """Position ids, int64 [R], and attention mask of chain and rows, if the answer cannot fork."""
        tree, past = requested.tree, self.cache.past_length
        chained = len(self._chains.get(requested.thread, ()))
        positions = [*range(past, past + chained), *tree.positions_of(requested.rows)]
        in_slots = [row for _, row in self._slots]
        seen = _ancestor_mask(tree, requested.rows, in_slots)
        if chained:  # no row below the chain has been drafted yet: there are no tree slots
            of_rows, seen = seen, torch.ones(len(positions), len(positions), dtype=torch.bool).tril_()
            seen[chained:, chained:] = of_rows
        slot_positions = [*tree.positions_of(in_slots), *positions]
        return _tensor(positions), Visibility(seen, past, lambda: _tensor(slot_positions))

    def settle_prompt(self, token_ids: Sequence[int]) -> None:
        """Finish the forward of rows from ``enter_prompt``."""
        self._added += token_ids

    def settle(self, entered: Entering) -> None:
        """Finish the forward of rows from ``enter``: the chains join the past, and the drafted rows join the tree slots."""
        if self._labels is not None:
            self._labels.settle()
        first, chained = len(self._slots), entered.rows.num_rows - len(entered.drafted)
        if chained:
            self._join(entered.token_ids[:chained])
            slots = torch.arange(self.cache.tree_length)
            self.cache.commit(slots[first : first + chained], torch.cat((slots[:first], slots[first + chained :])))
        self._chains = {}
        self._slots.update(zip(entered.drafted, range(first, first + len(entered.drafted)), strict=True))

    def follow_tree(self, thread: int, changes: RowChanges) -> None:
        """Commit and prune cache entries in the same way as the thread's tree."""
        self._ahead = RowsAhead((), ())
        kept_rows = {row: number for number, row in enumerate(changes.kept)}
        committed = [self._slots.get((thread, row)) for row in changes.committed]
        drafted = [slot for slot in committed if slot is not None]
        chain = [token for slot, token in zip(committed, changes.committed_ids, strict=True) if slot is None]
        kept = [(row, slot) for row, slot in self._in_slots() if row[0] != thread or row[1] in kept_rows]
        if self._labels is not None:
            own = {slot for row, slot in self._slots.items() if row[0] == thread}
            dropped = sorted(own - {slot for _, slot in kept})
            self._labels.commit(thread, _tensor(drafted), _tensor(dropped))
        if self.cache.tree_length:
            self._join(changes.committed_ids[: len(drafted)])
            self.cache.commit(_tensor(drafted), _tensor([slot for _, slot in kept]))
        rows = ((thread, kept_rows[row]) if of_thread == thread else (of_thread, row) for (of_thread, row), _ in kept)
        self._slots = {row: slot for slot, row in enumerate(rows)}
        if chain:
            self._chains[thread] = self._chains.get(thread, []) + chain

    def growing(self, requested: DraftRows, choices: int) -> GrowingTree:
        """The tree of rows that were just drafted, to be drafted ahead. Then call ``settle_ahead``."""
        assert requested.growth is not None
        slots = {row: slot for (_, row), slot in self._slots.items()}
        return GrowingTree(requested, requested.growth, slots, choices, self._device)

    def settle_ahead(self, rows: Sequence[int], forwards: Sequence[Forward]) -> None:
        """Finish forwards that were computed ahead: ``rows`` are those of their nodes."""
        self._ahead = RowsAhead(rows, forwards)

    def take_ahead(self, requested: DraftRows) -> Candidates:
        """The candidates of rows that were drafted ahead and now join the tree slots."""
        slots, candidates = self._ahead.take(requested)
        self._slots |= {(requested.thread, row): slot for row, slot in slots.items()}
        return candidates

    def _forget_ahead(self) -> None:
        """Drop rows that were drafted ahead and not asked for."""
        self._ahead = RowsAhead((), ())
        kept = self._in_slots()
        if len(kept) < self.cache.tree_length:
            self.cache.commit(_tensor([]), _tensor([slot for _, slot in kept]))
        self._slots = {row: slot for slot, (row, _) in enumerate(kept)}

    def _in_slots(self) -> list[tuple[Row, int]]:
        """The rows of trees by their slots. Those that were drafted ahead and not asked for have the other slots."""
        return sorted(self._slots.items(), key=itemgetter(1))

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
            self.cache.release(kept)


class _ThreadLabels:
    """The thread of each slot of the past and of the trees: decides which slots each row attends to, if the answer can fork."""

    def __init__(self, sequence: ThreadSequence) -> None:
        self._sequence = sequence  # read only
        self._past_labels = PastLabels(sequence)
        self._threads = _tensor([])  # int64 [N], the thread of each tree slot
        self._positions = _tensor([])  # int64 [N], its position id
        self._past_tokens: dict[int, int] = defaultdict(int)  # by thread: number of its tokens in the past
        self._entering: Callable[[], None] = lambda: None  # adds the rows that entered last

    def commit(self, number: int, committed: Tensor, dropped: Tensor) -> None:
        """Follow the tree of a thread. The ``dropped`` slots include the ``committed`` ones, which are accepted, in order."""
        indices = self._past_tokens[number] + torch.arange(len(committed))
        self._commit(torch.full_like(indices, number), indices, self._positions[committed])
        remains = torch.ones_like(self._threads, dtype=torch.bool)
        remains[dropped] = False
        self._threads, self._positions = self._threads[remains], self._positions[remains]

    def threads_changed(self) -> Tensor | None:
        """Forget tokens that no later token attends to. Returns int64, the slots of the past that remain; None if all do."""
        self._past_labels.threads_changed()
        return self._past_labels.forget_unneeded()

    def enter(
        self, chains: dict[int, list[int]], requested: Collection[DraftRows], slots: Sequence[Row]
    ) -> tuple[Tensor, Visibility]:
        """Position ids, int64 [R], and the attention mask of the rows of a forward: the chains, by thread, and then the requested
        rows. ``settle`` adds the former to the past, the latter to the N tree ``slots``.
        """
        chained = [(number, self._past_tokens[number] + index) for number, chain in chains.items() for index in range(len(chain))]
        chain = _tensor([[number for number, _ in chained], [index for _, index in chained]])
        chain_positions = _tensor([self._sequence.threads[number].positions[index] for number, index in chained])
        threads = _tensor([entry.thread for entry in requested for _ in entry.rows])
        positions = _tensor([position for entry in requested for position in entry.tree.positions_of(entry.rows)])
        seen = self._seen(chain, threads, requested, [row for _, row in slots])
        entering = torch.cat((chain_positions, positions))
        slot_positions = torch.cat((self._past_labels.past[2], self._positions, entering))

        def add() -> None:
            self._commit(chain[0], chain[1], chain_positions)
            self._threads = torch.cat((self._threads, threads))
            self._positions = torch.cat((self._positions, positions))

        self._entering = add
        return entering, Visibility(seen, self._sequence.prompt_length, lambda: slot_positions)

    def settle(self) -> None:
        """Add the rows that entered last."""
        self._entering()

    def _seen(self, chain: Tensor, threads: Tensor, requested: Collection[DraftRows], slot_rows: list[int]) -> Tensor:
        """The attention mask of a forward, bool [R, P + N + R]. ``chain``: int64 [2, C], thread and token index of the chained
        tokens. ``threads``: int64 [F], of the requested rows. ``slot_rows``: the row in each tree slot.
        """
        num_chained = chain.shape[1]
        of_threads = torch.cat((self._threads, chain[0], threads))  # [N + R], as the next two
        rows = _tensor([*slot_rows, *[_CHAINED] * num_chained, *(row for entry in requested for row in entry.rows)])
        past = _tensor([self._past_tokens[thread.number] for thread in self._sequence.threads])
        root_indices = past + torch.bincount(chain[0], minlength=len(past))  # [T], of the root of each thread's tree
        indices = torch.where(rows == 0, root_indices[of_threads], UNSEEN)
        indices[len(slot_rows) : len(slot_rows) + num_chained] = chain[1]
        seen = self._past_labels.seen(of_threads[len(slot_rows) :], of_threads, indices)
        seen_RN = seen[:, self._past_labels.past.shape[1] :]
        seen_RN[:num_chained] &= ~((of_threads == chain[0][:, None]) & (indices > chain[1][:, None]))
        first = num_chained
        for entry in requested:
            own = torch.nonzero((of_threads == entry.thread) & (rows != _CHAINED))[:, 0]
            before = [row for row in rows[own].tolist() if row not in entry.rows]
            seen_RN[first : first + len(entry.rows), own] = _ancestor_mask(entry.tree, entry.rows, before)
            first += len(entry.rows)
        return seen

    def _commit(self, threads: Tensor, indices: Tensor, positions: Tensor) -> None:
        self._past_labels.commit(threads, indices, positions)
        for number in threads.tolist():
            self._past_tokens[number] += 1


def _ancestor_mask(tree: DraftTree, rows: Sequence[int], in_slots: Sequence[int]) -> Tensor:
    """Which of the rows in N slots, and then of the F ``rows``, are each of ``rows`` or its ancestors: bool [F, N + F]."""
    columns = {row: column for column, row in enumerate((*in_slots, *rows))}
    seen = np.zeros((len(rows), len(columns)), dtype=np.bool_)
    for line, row in zip(seen, rows, strict=True):
        line[[columns[above] for above in tree.ancestors_of(row)]] = True
    return torch.from_numpy(seen)


def _tensor(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
