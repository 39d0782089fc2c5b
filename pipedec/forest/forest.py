"""A prediction tree for every decode thread of an answer, and one order of entry for the rows of all: that of a cache.

Owns which row of which tree each cache slot holds, what every row sees of its own and of other threads, and what a verdict does
to all of it. Rows travel with their thread and their parent in that thread's tree, so ranks need not agree on the order across
threads. Shapes: N rows of all trees, R rows that enter, P slots of the past, S = P + N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.core import Verdict
from pipedec.forest.slots import UNSEEN, Slots
from pipedec.forest.turn import Rest, Turn, follow
from pipedec.threads import Sequence
from pipedec.tree import Advance, PredictionTree, Sight


def paths(tree: PredictionTree, rows: list[int]) -> list[list[int]]:
    """For each of ``rows``, the tokens behind the root up to and with it."""
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
    """See ``Gaps``: what a thread's promises leave empty."""

    sequence: Sequence
    number: int

    def may_follow(self, token: int) -> bool:
        return self.sequence.may_leave_gap(token)

    def behind(self, path: list[int]) -> int:
        return self.sequence.gap(self.number, path)


def place(tree: PredictionTree, sequence: Sequence, number: int) -> None:
    """Put a tree's root where the thread's last token stands, and its children where the next will."""
    thread = sequence.threads[number]
    if sequence.leaves_gaps:
        tree.gaps = _ThreadGaps(sequence, number)
    if thread.pending is not None or not thread.positions:
        tree.place(thread.next_position, 0)
    else:
        tree.place(thread.positions[-1], thread.next_position - thread.positions[-1] - 1)


class Forest:
    """Replays the verdicts on an answer in several threads. ``trees`` are by thread number; ended threads may keep a root."""

    def __init__(self, sequence: Sequence, device: torch.device | str = "cpu") -> None:
        self.sequence = sequence
        self.trees: dict[int, PredictionTree] = {}
        self.slots = Slots(sequence, device)
        self._device = device
        self._past_tokens: dict[int, int] = {}  # of each thread, how many of its tokens have left its tree
        self.threads = torch.zeros(0, dtype=torch.int64, device=device)  # [N], each row's thread
        self._place(0)

    @property
    def num_rows(self) -> int:
        return len(self.threads)

    @property
    def token_ids(self) -> Tensor:
        """int64 [N]."""
        return self._gathered("token_ids")

    @property
    def parents(self) -> Tensor:
        """int64 [N], in each row's own tree; −1 for roots."""
        return self._gathered("parents")

    @property
    def positions(self) -> Tensor:
        """int64 [N], position ids."""
        return self._gathered("positions")

    def has_root(self, number: int) -> bool:
        """Whether the last accepted token of a thread has entered."""
        return number in self.trees and self.trees[number].num_rows > 0

    def entered(self, number: int) -> int:
        """How many of a thread's certain tokens have entered."""
        return self._past_tokens.get(number, 0) + self.has_root(number)

    def rows_of(self, number: int) -> Tensor:
        """int64, ascending: the rows of a thread's tree, in the tree's own order."""
        return torch.nonzero(self.threads == number)[:, 0]

    def append(self, token_ids: Tensor, parents: Tensor, threads: Tensor) -> slice:
        """Add R rows, whose parents are counted in their own trees, and return where they stand.

        Raises:
            ValueError: a thread that is not open, or a parent that is not there.
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
        """What ``rows`` see of the past and of all trees."""
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
        """Forget all rows of the main thread, which has the only ones; its root will stand at ``root_position``."""
        self.trees[0].reset(root_position)
        self.threads = self.threads[:0]

    def advance(self, verdict: Verdict) -> tuple[Advance, Turn]:
        """Replay a verdict: what it commits and keeps of the rows of all trees, and what it does to each thread."""
        turn = follow(self.sequence, verdict)
        token_ids = self.token_ids
        stays = torch.ones_like(self.threads, dtype=torch.bool)
        committed = []
        for number, tokens in turn.accepted.items():
            committed.append(self._accept(number, tokens, stays))
            turn.committed[number] = token_ids[committed[-1]]
        for number, rest in turn.rests.items():
            self._thin(number, rest, stays)
        for number in self.sequence.released() if turn.changes_threads else ():
            self._thin(number, Rest.NOTHING, stays)
        for number in {start.thread for start in turn.starts} | set(turn.accepted):
            self._place(number)
        if turn.starts:
            self.slots.changed()
        rows = torch.cat([self.threads[:0], *committed])
        advance = Advance(rows, token_ids[rows], torch.nonzero(stays)[:, 0], len(stays), hit=False)
        self.threads = self.threads[stays]
        return advance, turn

    def release(self) -> Tensor | None:
        """Forget tokens of the past that nobody will see again: int64, the slots of the past that stay; None if all do."""
        return self.slots.release()

    def _accept(self, number: int, tokens: tuple[int, ...], stays: Tensor) -> Tensor:
        """Advance one tree; returns the rows that have become past."""
        own, tree = self.rows_of(number), self.trees[number]
        positions = tree.positions
        advance = tree.advance(tokens)
        stays[own] = False
        stays[own[advance.kept]] = True
        count = len(advance.committed)
        indices = torch.arange(self._past_tokens[number], self._past_tokens[number] + count, device=self._device)
        self._past_tokens[number] += count
        self.slots.commit(torch.full_like(indices, number), indices, positions[advance.committed])
        return own[advance.committed]

    def _thin(self, number: int, rest: Rest, stays: Tensor) -> None:
        """Drop rows of a tree that has been advanced."""
        tree = self.trees.get(number)
        if tree is None or rest is Rest.SUBTREE or not tree.num_rows:
            return
        own = torch.nonzero(stays & (self.threads == number))[:, 0]
        if rest is Rest.ROOT:
            tree.keep(own.new_zeros(1))
            stays[own[1:]] = False
        else:
            tree.reset(tree.root_position)
            stays[own] = False

    def _place(self, number: int) -> None:
        if number not in self.trees:
            self.trees[number] = PredictionTree(self._device, block=64)
            self._past_tokens[number] = 0
        place(self.trees[number], self.sequence, number)

    def _gathered(self, name: str) -> Tensor:
        """[N], the values that each tree has for its own rows."""
        values = torch.zeros_like(self.threads)
        for number in self.threads.unique().tolist():
            values[self.threads == number] = getattr(self.trees[number], name)
        return values
