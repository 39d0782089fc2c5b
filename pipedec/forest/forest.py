"""One prediction tree for every decode thread of an answer; the rows of all trees share the slots of one KV cache.

Owns which row of which tree each cache slot holds, what each row attends to in its own and in other threads, and how a verdict
changes this. A row is sent with its thread and its parent's index in that thread's tree, so ranks need not agree on the order of
rows across threads. Shapes: N rows of all trees, in order of entry; R rows that enter; P slots of the past; S = P + N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.core import Verdict
from pipedec.forest.changes import Remaining, ThreadChanges, apply_verdict
from pipedec.forest.slots import UNSEEN, Slots
from pipedec.threads import Sequence, State
from pipedec.tree import Advance, PredictionTree, Sight


def paths(tree: PredictionTree, rows: list[int]) -> list[list[int]]:
    """For each of ``rows``, the tokens on the path from below the root to it, inclusive."""
    token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
    found = []
    for row in rows:
        path: list[int] = []
        while row > 0:
            path.append(token_ids[row])
            row = parents[row]
        found.append(path[::-1])
    return found


@dataclass(frozen=True)
class _ThreadGaps:
    """The ``Gaps`` of a thread: room for the predicted lengths of the children that it opens."""

    sequence: Sequence
    number: int

    def may_follow(self, token: int) -> bool:
        return self.sequence.may_leave_gap(token)

    def after(self, path: list[int]) -> int:
        return self.sequence.gap(self.number, path)


def position_root(tree: PredictionTree, sequence: Sequence, number: int) -> None:
    """Set the position of a tree's root to that of the thread's last token, and the gap so that its children get the next."""
    thread = sequence.threads[number]
    if sequence.leaves_gaps:
        tree.gaps = _ThreadGaps(sequence, number)
    if thread.pending is not None or not thread.positions:
        tree.set_root_position(thread.next_position, 0)
    else:
        tree.set_root_position(thread.positions[-1], thread.next_position - thread.positions[-1] - 1)


class Forest:
    """Replays the verdicts on an answer in several threads.

    Args:
        sequence: the answer's threads; the forest passes accepted tokens to it.

    Attributes:
        trees: by thread number. The tree of an ended thread may keep its root.
        threads: int64 [N], each row's thread.
    """

    def __init__(self, sequence: Sequence, device: torch.device | str = "cpu") -> None:
        self.sequence = sequence
        self.trees: dict[int, PredictionTree] = {}
        self.slots = Slots(sequence, device)
        self._device = device
        self._past_tokens: dict[int, int] = {}  # by thread: number of tokens that have moved from its tree to the past
        self.threads = torch.zeros(0, dtype=torch.int64, device=device)
        self._ensure_tree(0)

    @property
    def num_rows(self) -> int:
        return len(self.threads)

    @property
    def token_ids(self) -> Tensor:
        """int64 [N]."""
        return self._gathered("token_ids")

    @property
    def parents(self) -> Tensor:
        """int64 [N], row indices in each row's own tree; −1 for roots."""
        return self._gathered("parents")

    @property
    def positions(self) -> Tensor:
        """int64 [N], position ids."""
        return self._gathered("positions")

    def has_root(self, number: int) -> bool:
        """Whether the last certain token of a thread has entered."""
        return number in self.trees and self.trees[number].num_rows > 0

    def entered(self, number: int) -> int:
        """The number of a thread's certain tokens that have entered."""
        return self._past_tokens.get(number, 0) + self.has_root(number)

    def rows_of(self, number: int) -> Tensor:
        """The rows of a thread's tree, in that tree's order: int64, ascending."""
        return torch.nonzero(self.threads == number)[:, 0]

    def append(self, token_ids: Tensor, parents: Tensor, threads: Tensor) -> slice:
        """Add R rows; returns the slice of their indices.

        Args:
            token_ids: int64 [R].
            parents: int64 [R], row indices in each row's own tree; −1 for roots.
            threads: int64 [R], each row's thread.

        Raises:
            ValueError: a thread is not open, or a parent does not exist.
        """
        first = self.num_rows
        for number in threads.unique().tolist():
            if number not in self.trees:
                raise ValueError(f"a row for thread {number}, which is not open")
            is_own = threads == number
            self.trees[number].append(token_ids[is_own], parents[is_own])
        self.threads = torch.cat((self.threads, threads))
        return slice(first, self.num_rows)

    def sight(self, rows: slice) -> Sight:
        """The attention mask of ``rows`` over the past and all trees."""
        indices = torch.full_like(self.threads, UNSEEN)
        for number in self.threads.unique().tolist():
            indices[self.rows_of(number)[0]] = self._past_tokens[number]
        seen_RS = self.slots.seen(self.threads[rows], self.threads, indices)
        seen_RN = seen_RS[:, self.slots.past_length :]
        for number in self.threads[rows].unique().tolist():
            own = self.rows_of(number)
            entered = torch.nonzero(self.threads[rows] == number)[:, 0]
            seen_RN[entered[:, None], own] = self.trees[number].tree_mask[-len(entered) :]
        positions = torch.cat((self.slots.past_positions, self.positions))
        return Sight(seen_RS, positions, self.slots.shared)

    def child(self, row: int, token: int) -> int | None:
        """The child of ``row`` with this token id, or None."""
        number = int(self.threads[row])
        own = self.rows_of(number)
        found = self.trees[number].child(int(torch.searchsorted(own, row)), token)
        return None if found is None else int(own[found])

    def reset(self, root_position: int) -> None:
        """Drop all rows of the main thread, the only thread with rows; its next root gets position ``root_position``."""
        self.trees[0].reset(root_position)
        self.threads = self.threads[:0]

    def advance(self, verdict: Verdict) -> tuple[Advance, ThreadChanges]:
        """Replay a verdict. Returns which rows of all trees are committed and kept, and the effects on each thread."""
        changes = apply_verdict(self.sequence, verdict)
        token_ids = self.token_ids
        is_kept = torch.ones_like(self.threads, dtype=torch.bool)
        committed = []
        for number, tokens in changes.accepted.items():
            committed.append(self._accept(number, tokens, is_kept))
            changes.committed[number] = token_ids[committed[-1]]
        for number, remaining in changes.remaining.items():
            self._reduce(number, remaining, is_kept)
        if changes.affects_threads:
            self._drop_unneeded_roots(is_kept)
        for number in {start.thread for start in changes.starts} | set(changes.accepted):
            self._ensure_tree(number)
        if changes.starts:
            self.slots.threads_changed()
        rows = torch.cat([self.threads[:0], *committed])
        advance = Advance(rows, token_ids[rows], torch.nonzero(is_kept)[:, 0], len(is_kept), hit=False)
        self.threads = self.threads[is_kept]
        return advance, changes

    def release(self) -> Tensor | None:
        """Forget tokens that no later token attends to. Returns int64, the slots of the past that remain; None if all do."""
        return self.slots.release()

    def _accept(self, number: int, tokens: tuple[int, ...], is_kept: Tensor) -> Tensor:
        """Advance one tree; returns the rows that are committed."""
        own, tree = self.rows_of(number), self.trees[number]
        positions = tree.positions
        advance = tree.advance(tokens)
        is_kept[own] = False
        is_kept[own[advance.kept]] = True
        count = len(advance.committed)
        indices = torch.arange(self._past_tokens[number], self._past_tokens[number] + count, device=self._device)
        self._past_tokens[number] += count
        self.slots.commit(torch.full_like(indices, number), indices, positions[advance.committed])
        return own[advance.committed]

    def _reduce(self, number: int, remaining: Remaining, is_kept: Tensor) -> None:
        """Drop rows of a tree that has been advanced."""
        tree = self.trees.get(number)
        if tree is None or remaining is Remaining.SUBTREE or not tree.num_rows:
            return
        own = torch.nonzero(is_kept & (self.threads == number))[:, 0]
        if remaining is Remaining.ROOT:
            tree.keep(own.new_zeros(1))
            is_kept[own[1:]] = False
        else:
            tree.reset(tree.root_position)
            is_kept[own] = False

    def _drop_unneeded_roots(self, is_kept: Tensor) -> None:
        """Drop the last tokens of ended threads if no later token attends to them."""
        for thread, needed in zip(self.sequence.threads, self.sequence.needed(), strict=True):
            if thread.state is State.ENDED and needed < thread.num_tokens:
                self._reduce(thread.number, Remaining.NOTHING, is_kept)

    def _ensure_tree(self, number: int) -> None:
        """Create a thread's tree if it has none, and set the position of its root."""
        if number not in self.trees:
            self.trees[number] = PredictionTree(self._device, block=64)
            self._past_tokens[number] = 0
        position_root(self.trees[number], self.sequence, number)

    def _gathered(self, name: str) -> Tensor:
        """[N], the attribute ``name`` of every row, collected from the trees."""
        values = torch.zeros_like(self.threads)
        for number in self.threads.unique().tolist():
            values[self.threads == number] = getattr(self.trees[number], name)
        return values
