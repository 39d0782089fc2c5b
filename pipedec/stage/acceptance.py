"""Acceptance: in every decode thread, the target's tokens are accepted as deep as there are rows (PipeDec §3.3.4).

Knows the trees and the target's token after each row; knows no model, no sampling and no cache. Further rows may arrive between a
verdict and its replay, so it has a ``Sequence`` of its own, which is ahead of the forest's.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from pipedec.forest import Forest, ThreadChanges
from pipedec.threads import Sequence, State


class Walk(NamedTuple):
    """Rows of one thread, each the child of the one before, and their successors, which are accepted.

    Attributes:
        rows: rows of the forest.
        tokens: the successor of each.
    """

    thread: int
    rows: list[int]
    tokens: tuple[int, ...]


class Acceptance:
    """Walks the tree of each thread from its last accepted token.

    Args:
        sequence: a new one; nothing else passes tokens to it.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._ahead: dict[int, list[int]] = defaultdict(list)  # by thread: accepted tokens not replayed yet
        self._stopped: set[int] = set()  # threads whose last such token joins or ends: they continue after its replay

    @property
    def finished(self) -> str | None:
        """Why the accepted tokens end the answer (see ``Verdict.finished``); None if they do not."""
        return self._sequence.finished

    def accept(self, number: int, token: int) -> None:
        """Accept the next token of a thread."""
        if self._sequence.ends_walk(number, token):
            self._stopped.add(number)
        self._sequence.accept(number, token)
        self._ahead[number].append(token)

    def verify(self, forest: Forest, successors: list[int]) -> list[Walk]:
        """Accept tokens in every thread, until one joins or ends the thread or has no row yet.

        Args:
            forest: the last stage's forest; all its rows are computed.
            successors: the target's token after each row.

        Returns:
            the walks of the threads that accept any token.
        """
        walks = [self._walk(forest, number, successors) for number in forest.trees]
        return [walk for walk in walks if walk.rows]

    def _walk(self, forest: Forest, number: int, successors: list[int]) -> Walk:
        tree, thread = forest.trees[number], self._sequence.threads[number]
        row = 0 if tree.num_rows and number not in self._stopped else None
        for token in self._ahead[number]:
            row = None if row is None else tree.child(row, token)
        own = () if row is None else forest.rows_of(number)
        rows, tokens = [], []
        while row is not None and thread.state is State.RUNNING:
            rows.append(own[row])
            tokens.append(successors[rows[-1]])
            self.accept(number, tokens[-1])
            row = None if number in self._stopped else tree.child(row, tokens[-1])
        return Walk(number, rows, tuple(tokens))

    def replayed(self, changes: ThreadChanges) -> None:
        """To be called when the forest has been advanced by a verdict with these effects. Verdicts are replayed in order."""
        for number, tokens in changes.accepted.items():
            del self._ahead[number][: len(tokens)]
            if not self._ahead[number]:
                self._stopped.discard(number)
