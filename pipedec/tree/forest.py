"""The prediction trees of an answer, one for each decode thread (APAR §2, PASTA §3). Their rows share the slots of one KV cache.

Owns which row of which tree each cache slot holds, what each row attends to in its own and in other threads, and how a verdict
changes threads and trees: all ranks derive the same changes from the same verdict. A row is sent with its thread and its parent's
index in that thread's tree, so ranks need not agree on the order of rows across threads. Knows no model and no method.

Slots are in cache order: first the past, beginning with the prompt, then the rows of all trees. All threads attend to the whole
prompt, so its slots have no labels. A token is *certain* when it is accepted or forced. Shapes: N rows of all trees, in order of
entry; R rows that enter; P slots of the past after the prompt; T threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from pipedec.core.verdict import Verdict
from pipedec.threads import DecodeThread, Sequence, Start, State
from pipedec.tree.masks import Visibility
from pipedec.tree.prediction_tree import Advance, DraftTree, Gaps, PredictionTree

UNSEEN = 2**40  # in place of the token index, for rows that are not certain: only rows of their own tree attend to them


class Remaining(Enum):
    """The rows of a thread's tree that remain after a verdict."""

    SUBTREE = "subtree"  # the one below the last accepted token
    ROOT = "root"  # the last accepted token alone: the thread has ended, but other threads will attend to that token
    NOTHING = "nothing"


@dataclass
class ThreadChanges:
    """The effects of a verdict. All dicts are keyed by thread number.

    Attributes:
        accepted: accepted tokens.
        remaining: what is left of the trees of threads that accepted tokens, have ended or were cut.
        last: last tokens of ended threads that other threads will attend to. They enter, and nothing is decoded after them.
        starts: tokens that become roots of new trees.
    """

    accepted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    remaining: dict[int, Remaining] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)

    @property
    def affects_threads(self) -> bool:
        """Whether a thread was opened, joined others, or ended."""
        return bool(self.starts) or Remaining.NOTHING in self.remaining.values() or bool(self.last)


def apply_verdict(sequence: Sequence, verdict: Verdict) -> ThreadChanges:
    """Pass the accepted tokens to ``sequence``; returns the effects on all threads.

    Tokens of a thread are void if another thread's token in the same verdict has cut it.
    """
    changes = ThreadChanges()
    running = [thread.number for thread in sequence.threads if thread.state is State.RUNNING]
    waiting = [thread.number for thread in sequence.threads if thread.state is State.WAITING]
    for number, tokens, *_ in verdict.accepted:
        if not tokens or sequence.threads[number].is_cut:
            continue
        changes.accepted[number] = tokens
        changes.remaining[number] = Remaining.SUBTREE
        for token in tokens:
            changes.starts += sequence.accept_token(number, token)
    if verdict.finished is not None and sequence.finished is None:
        sequence.end_all(verdict.finished)
    changes.starts = [start for start in changes.starts if sequence.threads[start.thread].state is not State.ENDED]
    for number in running:
        thread = sequence.threads[number]
        if thread.state is not State.RUNNING:
            last = _visible_last_token(sequence, thread) if sequence.can_fork else None
            changes.remaining[number] = Remaining.NOTHING if last is None else Remaining.ROOT
            if last is not None:
                changes.last[number] = last
    for number in waiting:
        if sequence.threads[number].is_cut:  # nothing will attend to its last token, and a pending token will never enter
            changes.remaining[number] = Remaining.NOTHING
    for start in changes.starts:
        changes.remaining[start.thread] = Remaining.NOTHING
    return changes


def _visible_last_token(sequence: Sequence, thread: DecodeThread) -> int | None:
    """The last token of a thread that has stopped, if its parent's join or one of its children may attend to it."""
    if thread.state is State.ENDED:
        return thread.token_ids[-1] if sequence.needed()[thread.number] == thread.num_tokens > 0 else None
    if not thread.is_closing or thread.parent is None:
        return None
    return thread.token_ids[-1] if thread.pending is None else thread.pending


def position_root(tree: DraftTree, sequence: Sequence, number: int) -> None:
    """Set the position of a tree's root to that of the thread's last token, and the gap so that its children get the next."""
    thread = sequence.threads[number]
    if sequence.leaves_gaps:
        tree.gaps = Gaps(sequence, number)
    if thread.pending is not None or not thread.positions:
        tree.set_root_position(thread.next_position, 0)
    else:
        tree.set_root_position(thread.positions[-1], thread.next_position - thread.positions[-1] - 1)


class PastLabels:
    """Labels of the slots of the past, and how many tokens of every other thread each thread attends to. On the host.

    Attributes:
        past: int64 [3, P]: thread, token index and position id of each slot.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self.past = torch.zeros(3, 0, dtype=torch.int64)
        self._limits: Tensor | None = None  # int64 [T, T], how many tokens of each thread a thread attends to; None: outdated

    def commit(self, threads: Tensor, indices: Tensor, positions: Tensor) -> None:
        """Append rows to the past: the thread of each token, its index there, and its position id, each int64 [R]."""
        self.past = torch.cat((self.past, torch.stack((threads, indices, positions))), 1)

    def seen(self, threads_R: Tensor, tree_threads_N: Tensor, tree_indices_N: Tensor) -> Tensor:
        """Which certain tokens after the prompt the rows attend to: bool [R, P + N].

        Args:
            threads_R: int64, the thread of each row.
            tree_threads_N, tree_indices_N: int64, thread and token index of each tree slot; UNSEEN if it is not certain.
        """
        labels = torch.cat((self.past[0], tree_threads_N))
        indices = torch.cat((self.past[1], tree_indices_N))
        if self._limits is None:
            threads = self._sequence.threads
            table = [[0] * len(threads) for _ in threads]
            for thread, limits in zip(threads, table, strict=True):
                for other, tokens in thread.context():
                    limits[other] = max(limits[other], tokens)
                limits[thread.number] = UNSEEN
            self._limits = torch.tensor(table)
        return indices < self._limits[threads_R][:, labels]

    def forget_unneeded(self) -> Tensor | None:
        """Forget tokens that no later token attends to (APAR §2.4). Returns int64, the slots that remain, the prompt's included;
        None if all do.
        """
        needed = torch.tensor(self._sequence.needed())
        is_kept = self.past[1] < needed[self.past[0]]
        if bool(is_kept.all()):
            return None
        self.past = self.past[:, is_kept]
        prompt = torch.arange(self._sequence.prompt_length)
        return torch.cat((prompt, torch.nonzero(is_kept)[:, 0] + len(prompt)))

    def threads_changed(self) -> None:
        """Call this when threads were opened or have joined others."""
        self._limits = None


class Forest:
    """The tree of an answer that cannot fork. Its rows are in order of entry and attend to the whole past.

    Replays the verdicts on the answer. Everything is on the host, where rows and verdicts arrive; what a model needs is copied to
    its device.

    Args:
        sequence: the answer, to which the forest passes accepted tokens. Earlier tokens are in the past.

    Attributes:
        trees: by thread number.
        threads: int64 [N], each row's thread; None if the answer cannot fork.
    """

    threads: Tensor | None = None

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._tree = PredictionTree()
        self._tree.reset(sequence.main.next_position)
        self.trees = {0: self._tree}

    @property
    def num_rows(self) -> int:
        return self._tree.num_rows

    @property
    def token_ids(self) -> Tensor:
        """int64 [N]."""
        return self._tree.token_ids

    @property
    def parents(self) -> Tensor:
        """int64 [N], row indices in each row's own tree; −1 for roots."""
        return self._tree.parents

    def positions_of(self, rows: slice) -> Tensor:
        """int64, the position ids of ``rows``."""
        return torch.tensor(self._tree.positions_of(range(*rows.indices(self.num_rows))), dtype=torch.int64)

    def rows_of(self, number: int) -> range | list[int]:
        """The rows of a thread, in the order of its tree."""
        return range(self._tree.num_rows)

    def by_thread(self, rows: slice) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields for each thread of ``rows`` its number, and its rows twice: int64, indices into ``rows``, and into its tree."""
        own = torch.arange(rows.start, rows.stop)
        yield 0, own - rows.start, own

    def append(self, token_ids: Tensor, parents: Tensor, threads: Tensor | None = None) -> slice:
        """Add R rows; returns the slice of their indices.

        Args:
            token_ids: int64 [R].
            parents: int64 [R], row indices in each row's own tree; −1 for roots.
            threads: int64 [R], each row's thread; None if all are of the main thread.

        Raises:
            ValueError: a thread is not open, or a parent does not exist.
        """
        return self._tree.append(token_ids, parents)

    def visibility(self, rows: slice) -> Visibility:
        """The attention mask of ``rows`` over the past and all trees."""
        return Visibility(self._tree.tree_mask[rows], self._tree.root_position, lambda: self._tree.positions)

    def child(self, row: int, token: int) -> int | None:
        """The child of ``row`` with this token id, or None."""
        return self._tree.child(row, token)

    def replay(self, verdict: Verdict) -> tuple[Advance, ThreadChanges, Tensor | None]:
        """Replay a verdict, which may free slots of the past.

        Returns:
            the rows of all trees that are committed and kept; the effects on each thread; int64, the slots of the past, committed
            rows included, to which later tokens may attend, or None if these are all.
        """
        changes = apply_verdict(self.sequence, verdict)
        return self._tree.advance_to(changes.accepted.get(0, ())), changes, None


class ThreadedForest(Forest):
    """The trees of an answer that may fork, one for every thread. The tree of an ended thread may keep its root.

    Args:
        tracks_paths: say which rows join the past of each thread (``Advance.joining``), as recurrent layers need. Threads must
            not join others.
    """

    threads: Tensor

    def __init__(self, sequence: Sequence, tracks_paths: bool = False) -> None:
        super().__init__(sequence)
        self._num_past: dict[int, int] | None = {0: 0} if tracks_paths else None  # by thread: tokens that its past has gained
        self.threads = torch.zeros(0, dtype=torch.int64)
        self._past_labels = PastLabels(sequence)
        self._past_tokens = {0: 0}  # by thread: number of tokens that have moved from its tree to the past
        self._rows: dict[int, Tensor] = {}  # by thread that has any: int64, its rows, in the order of its tree
        if sequence.leaves_gaps:
            self._tree.gaps = Gaps(sequence, 0)

    @property
    def num_rows(self) -> int:
        return self.threads.shape[0]

    @property
    def token_ids(self) -> Tensor:
        return self._of_trees("token_ids")

    @property
    def parents(self) -> Tensor:
        return self._of_trees("parents")

    def positions_of(self, rows: slice) -> Tensor:
        return self._of_trees("positions")[rows]

    def _of_trees(self, name: str) -> Tensor:
        """[N], the attribute ``name`` of every row."""
        values = torch.zeros_like(self.threads)
        if self._rows:
            values[torch.cat(list(self._rows.values()))] = torch.cat([getattr(self.trees[number], name) for number in self._rows])
        return values

    def rows_of(self, number: int) -> range | list[int]:
        return self._rows[number].tolist()

    def by_thread(self, rows: slice) -> Iterator[tuple[int, Tensor, Tensor]]:
        for number in self.threads[rows].unique().tolist():
            own = self._rows[number]
            of_tree = ((own >= rows.start) & (own < rows.stop)).nonzero()[:, 0]
            yield number, own[of_tree] - rows.start, of_tree

    def append(self, token_ids: Tensor, parents: Tensor, threads: Tensor | None = None) -> slice:
        threads = torch.zeros_like(parents) if threads is None else threads
        first = self.num_rows
        for number in threads.unique().tolist():
            if number not in self.trees:
                raise ValueError(f"a row for thread {number}, which is not open")
            is_own = threads == number
            self.trees[number].append(token_ids[is_own], parents[is_own])
        self._set_threads(torch.cat((self.threads, threads)))
        return slice(first, self.num_rows)

    def _set_threads(self, threads: Tensor) -> None:
        order = threads.argsort(stable=True)
        numbers, counts = threads[order].unique_consecutive(return_counts=True)
        self.threads = threads
        self._rows = dict(zip(numbers.tolist(), order.split(counts.tolist()), strict=True))

    def visibility(self, rows: slice) -> Visibility:
        indices = torch.full_like(self.threads, UNSEEN)
        for number, own in self._rows.items():
            indices[own[0]] = self._past_tokens[number]
        seen = self._past_labels.seen(self.threads[rows], self.threads, indices)
        past_positions = self._past_labels.past[2]
        seen_RN = seen[:, len(past_positions) :]
        for number, of_step, of_tree in self.by_thread(rows):
            seen_RN[of_step[:, None], self._rows[number]] = self.trees[number].tree_mask[of_tree]
        return Visibility(seen, self.sequence.prompt_length, lambda: torch.cat((past_positions, self._of_trees("positions"))))

    def child(self, row: int, token: int) -> int | None:
        number = int(self.threads[row])
        own = self._rows[number]
        found = self.trees[number].child(int(torch.searchsorted(own, row)), token)
        return None if found is None else int(own[found])

    def replay(self, verdict: Verdict) -> tuple[Advance, ThreadChanges, Tensor | None]:
        changes = apply_verdict(self.sequence, verdict)
        token_ids = self.token_ids
        is_kept = torch.ones_like(self.threads, dtype=torch.bool)
        rows_of = {(number, self._past_tokens[number]): int(own[0]) for number, own in self._rows.items()}
        committed = [self._accept(number, tokens, is_kept) for number, tokens in changes.accepted.items()]
        joining = self._joining(rows_of, dict(zip(changes.accepted, committed, strict=True)))
        for number, remaining in changes.remaining.items():
            self._reduce(number, remaining, is_kept)
        if changes.affects_threads:  # the last tokens of ended threads go if no later token attends to them
            for thread, needed in zip(self.sequence.threads, self.sequence.needed(), strict=True):
                if thread.state is State.ENDED and needed < thread.num_tokens:
                    self._reduce(thread.number, Remaining.NOTHING, is_kept)
        for number in {start.thread for start in changes.starts} | set(changes.accepted):
            if number not in self.trees:
                self.trees[number] = PredictionTree(block=64)
                self._past_tokens[number] = 0
            position_root(self.trees[number], self.sequence, number)
        if changes.starts:
            self._past_labels.threads_changed()
        rows = torch.cat([self.threads[:0], *committed])
        advance = Advance(rows, token_ids[rows], torch.nonzero(is_kept)[:, 0], len(is_kept), hit=False, joining=joining)
        self._set_threads(self.threads[is_kept])
        return advance, changes, self._past_labels.forget_unneeded() if changes.affects_threads else None

    def _joining(self, rows_of: dict[tuple[int, int], int], committed: Mapping[int, Tensor]) -> dict[int, list[int]] | None:
        """``Advance.joining``. A thread's past has the tokens that it attends to up to the last committed one. One that ends may
        have a last token in flight, or yet to enter, which follows this past.

        Args:
            rows_of: the rows of roots before the verdict, by thread and token index.
        """
        if self._num_past is None:
            return None
        for number, rows in committed.items():
            first = self._past_tokens[number] - len(rows)
            rows_of |= {(number, first + index): row for index, row in enumerate(rows.tolist())}
        left = {row for rows in committed.values() for row in rows.tolist()}
        joining: dict[int, list[int]] = {}
        for thread in self.sequence.threads:
            if thread.state is State.ENDED and thread.number not in committed:
                continue
            if thread.number not in self._num_past:
                assert thread.parent is not None
                self._num_past[thread.number] = self._num_past[thread.parent] - len(joining.get(thread.parent, ()))
            path, position, known = list[int](), 0, self._num_past[thread.number]
            for other, count in (*thread.context(), (thread.number, thread.num_tokens)):
                path += [rows_of[token] for index in range(max(known - position, 0), count)
                         if (token := (other, index)) in rows_of]  # fmt: skip
                position += count
            while path and path[-1] not in left:
                path.pop()
            joining[thread.number] = path
            self._num_past[thread.number] += len(path)
        return joining

    def _accept(self, number: int, tokens: tuple[int, ...], is_kept: Tensor) -> Tensor:
        """Advance one tree; returns the rows that are committed."""
        own, tree = self._rows.get(number, self.threads[:0]), self.trees[number]
        positions = tree.positions
        advance = tree.advance_to(tokens)
        is_kept[own] = False
        is_kept[own[advance.kept]] = True
        count = len(advance.committed)
        indices = torch.arange(self._past_tokens[number], self._past_tokens[number] + count)
        self._past_tokens[number] += count
        self._past_labels.commit(torch.full_like(indices, number), indices, positions[advance.committed])
        return own[advance.committed]

    def _reduce(self, number: int, remaining: Remaining, is_kept: Tensor) -> None:
        """Drop rows of a tree that has been advanced."""
        tree = self.trees.get(number)
        if tree is None or remaining is Remaining.SUBTREE or not tree.num_rows:
            return
        own = self._rows[number]
        own = own[is_kept[own]]
        if remaining is Remaining.ROOT:
            tree.keep(own.new_zeros(1))
            is_kept[own[1:]] = False
        else:
            tree.reset(tree.root_position)
            is_kept[own] = False


def forest_of(sequence: Sequence, tracks_paths: bool = False) -> Forest:
    """A new forest of the kind that the answer needs. ``tracks_paths``: see ``ThreadedForest``."""
    return ThreadedForest(sequence, tracks_paths) if sequence.can_fork else Forest(sequence)
