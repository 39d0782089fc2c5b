"""The rows of one request in flight, numbered for those who watch: a light copy of the trees that every stage keeps.

Stages number the rows of a tree in the order of their entry, and anew after every verdict. Watchers want numbers that stay.
Host memory and plain lists only: this runs beside the decode loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipedec.core import Verdict
from pipedec.forest import Remaining, ThreadChanges, apply_verdict
from pipedec.threads import Sequence as ThreadSequence


class Entered(NamedTuple):
    """A row that has entered. ``parent`` is −1 for a root, or where the parent is not known; ``chance`` is None if it is not."""

    id: int
    parent: int
    token: int
    chance: float | None
    thread: int


class Carried(NamedTuple):
    """What a verdict means for the rows in flight.

    Attributes:
        rows: for each accepted token, in order, the id of the row that carried it; None if none did.
        pruned: ids of rows that the verdict voids.
    """

    rows: list[int | None]
    pruned: list[int]


@dataclass
class _Row:
    id: int
    parent: int | None  # index into the tree
    token: int
    chance: float | None


class _Tree:
    """The rows of one thread, in the order in which they have entered. The first one is the root."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []

    def enter(self, id: int, token: int, parent: int, log_prob: float | None) -> Entered:
        above = self.rows[parent] if 0 <= parent < len(self.rows) else None
        row = _Row(id, None if above is None else parent, token, _chance(above, log_prob))
        self.rows.append(row)
        return Entered(id, -1 if above is None else above.id, token, row.chance, 0)

    def advance(self, tokens: Sequence[int]) -> Carried:
        place = 0 if self.rows else None
        carried: list[int | None] = []
        path = set[int]()
        for token in tokens:
            if place is not None:
                path.add(place)
                place = self._child(place, token)
            carried.append(None if place is None else self.rows[place].id)
        kept = set() if place is None else self._subtree(place)
        pruned = [row.id for index, row in enumerate(self.rows) if index not in kept and index not in path]
        self.keep(kept)
        return Carried(carried, pruned)

    def _child(self, place: int, token: int) -> int | None:
        return next((index for index, row in enumerate(self.rows) if row.parent == place and row.token == token), None)

    def _subtree(self, top: int) -> set[int]:
        kept = {top}
        for index in range(top + 1, len(self.rows)):
            if self.rows[index].parent in kept:
                kept.add(index)
        return kept

    def keep(self, kept: set[int]) -> list[int]:
        """Keep these rows, the first of which becomes the root. Returns the ids of the others."""
        order = sorted(kept)
        places = {old: new for new, old in enumerate(order)}
        dropped = [row.id for index, row in enumerate(self.rows) if index not in kept]
        self.rows = [self.rows[index] for index in order]
        for row in self.rows:
            row.parent = None if row.parent is None else places.get(row.parent)
        if self.rows:
            _renormalise(self.rows)
        return dropped


def _chance(above: _Row | None, log_prob: float | None) -> float | None:
    """That a row is accepted, seen from its root, which is certain."""
    if above is None:
        return 1.0
    if above.chance is None or log_prob is None:
        return None
    return above.chance * math.exp(log_prob)


def _renormalise(rows: list[_Row]) -> None:
    """The first row was accepted, so that it is certain now."""
    root = rows[0].chance
    for row in rows:
        row.chance = None if row.chance is None or not root else min(row.chance / root, 1.0)


class LiveTrees:
    """The trees of one request, from the first of its rows on.

    Args:
        sequence: of its threads, just begun; None for an answer in one thread.
        first_id: of the next row.
    """

    def __init__(self, sequence: ThreadSequence | None, first_id: int = 0) -> None:
        self._sequence = sequence
        self._trees: dict[int, _Tree] = {}
        self._next_id = first_id

    def enter(
        self, token_ids: Sequence[int], parents: Sequence[int], threads: Sequence[int], log_probs: Sequence[float] | None
    ) -> list[Entered]:
        """Rows enter the first stage, as a ``Step`` has them. A root without rows before it begins a tree."""
        entered = []
        for place, (token, parent, thread) in enumerate(zip(token_ids, parents, threads, strict=True)):
            tree = self._trees.setdefault(thread, _Tree())
            if parent < 0:
                tree.rows.clear()
            row = tree.enter(self._next_id, token, parent, None if log_probs is None else log_probs[place])
            self._next_id += 1
            entered.append(row._replace(thread=thread))
        return entered

    def accept(self, verdict: Verdict) -> Carried:
        """A verdict has come."""
        changes = self._changes(verdict)
        carried, pruned = list[int | None](), list[int]()
        for thread, tokens in changes.accepted.items():
            of_thread = self._trees.setdefault(thread, _Tree()).advance(tokens)
            carried += of_thread.rows
            pruned += of_thread.pruned
        for thread, remaining in changes.remaining.items():
            if remaining is not Remaining.SUBTREE and (tree := self._trees.get(thread)) is not None and tree.rows:
                pruned += tree.keep({0} if remaining is Remaining.ROOT else set())
        if verdict.finished is not None:
            last = {row for row in carried[-1:] if row is not None}
            pruned += [id for tree in self._trees.values() for id in tree.keep(set()) if id not in last]
        return Carried(carried, pruned)

    def _changes(self, verdict: Verdict) -> ThreadChanges:
        if self._sequence is not None:
            return apply_verdict(self._sequence, verdict)
        return ThreadChanges(accepted={part.thread: part.tokens for part in verdict.accepted})
