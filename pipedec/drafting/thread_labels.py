"""The thread of each slot of the draft model's cache, and so which slots each row attends to, if an answer can fork.

Shapes: N tree slots of the cache, C accepted tokens that were never drafted, F rows to draft, R = C + F, P slots of the past
after the prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from pipedec.drafting.masks import ancestor_mask
from pipedec.forest import Slots
from pipedec.forest.slots import UNSEEN
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import DraftRows, Visibility

_CHAINED = -1  # replaces the row of a token that is in no tree


class ThreadLabels:
    """Labels of the past and of the tree slots.

    Args:
        sequence: the answer's threads, read only.
    """

    def __init__(self, sequence: ThreadSequence) -> None:
        self._sequence = sequence
        self._slots = Slots(sequence)
        self._threads = self._tensor([])  # int64 [N], the thread of each tree slot
        self._positions = self._tensor([])  # int64 [N], its position id
        self._past_tokens: dict[int, int] = defaultdict(int)  # by thread: number of its tokens in the past

    def advance(self, number: int, committed: Tensor, dropped: Tensor) -> None:
        """Follow the tree of a thread.

        Args:
            committed: int64, tree slots whose tokens are accepted, in order.
            dropped: int64, all tree slots of the thread that do not remain, including ``committed``.
        """
        indices = self._past_tokens[number] + torch.arange(len(committed))
        self._commit(torch.full_like(indices, number), indices, self._positions[committed])
        remains = torch.ones_like(self._threads, dtype=torch.bool)
        remains[dropped] = False
        self._threads, self._positions = self._threads[remains], self._positions[remains]

    def threads_changed(self) -> Tensor | None:
        """Forget tokens that no later token attends to. Returns int64, the slots of the past that remain; None if all do."""
        self._slots.threads_changed()
        return self._slots.release()

    def enter(
        self, chains: dict[int, list[int]], requested: Collection[DraftRows], slots: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Visibility]:
        """Add the rows of a forward: the chains join the past, the requested rows the tree slots.

        Args:
            chains: by thread, token ids that follow its tokens in the past.
            slots: thread and row of its tree in each of the N tree slots.

        Returns:
            int64 [R], position ids; and the attention mask. The chains come first.
        """
        chained = [(number, self._past_tokens[number] + index) for number, chain in chains.items() for index in range(len(chain))]
        chain = self._tensor([[number for number, _ in chained], [index for _, index in chained]])
        chain_positions = self._tensor([self._sequence.threads[number].positions[index] for number, index in chained])
        threads = self._tensor([entry.thread for entry in requested for _ in entry.rows])
        positions = self._tensor([position for entry in requested for position in entry.tree.positions_of(entry.rows)])
        seen = self._seen(chain, threads, requested, [row for _, row in slots])
        entering = torch.cat((chain_positions, positions))
        slot_positions = torch.cat((self._slots.past_positions, self._positions, entering))
        self._commit(chain[0], chain[1], chain_positions)
        self._threads = torch.cat((self._threads, threads))
        self._positions = torch.cat((self._positions, positions))
        return entering, Visibility(seen, self._sequence.prompt_length, lambda: slot_positions)

    def _seen(self, chain: Tensor, threads: Tensor, requested: Collection[DraftRows], slot_rows: list[int]) -> Tensor:
        """The attention mask of a forward: bool [R, P + N + R].

        Args:
            chain: int64 [2, C], thread and token index of the chained tokens.
            threads: int64 [F], threads of the requested rows.
        """
        num_chained = chain.shape[1]
        of_threads = torch.cat((self._threads, chain[0], threads))  # [N + R], as the next two
        rows = self._tensor([*slot_rows, *[_CHAINED] * num_chained, *(row for entry in requested for row in entry.rows)])
        indices = torch.where(rows == 0, self._root_indices(chain[0])[of_threads], UNSEEN)
        indices[len(slot_rows) : len(slot_rows) + num_chained] = chain[1]
        seen = self._slots.seen(of_threads[len(slot_rows) :], of_threads, indices)
        seen_RN = seen[:, self._slots.past_length :]
        seen_RN[:num_chained] &= ~((of_threads == chain[0][:, None]) & (indices > chain[1][:, None]))
        first = num_chained
        for entry in requested:
            own = torch.nonzero((of_threads == entry.thread) & (rows != _CHAINED))[:, 0]
            before = [row for row in rows[own].tolist() if row not in entry.rows]
            seen_RN[first : first + len(entry.rows), own] = ancestor_mask(entry.tree, entry.rows, before)
            first += len(entry.rows)
        return seen

    def _root_indices(self, chain_threads: Tensor) -> Tensor:
        """int64 [T], for each thread the index of the token that is the root of its tree."""
        past = self._tensor([self._past_tokens[thread.number] for thread in self._sequence.threads])
        return past + torch.bincount(chain_threads, minlength=len(past))

    def _commit(self, threads: Tensor, indices: Tensor, positions: Tensor) -> None:
        self._slots.commit(threads, indices, positions)
        for number in threads.tolist():
            self._past_tokens[number] += 1

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)
