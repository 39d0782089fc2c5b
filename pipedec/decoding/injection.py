"""The tree of best-first injection: all rows that were drafted or have entered the pipeline, and the choices below them.

Owns the probability that each row and choice is accepted (its *chance*), and selects the most probable ones to be drafted or to
enter. The trees of the stages hold only the rows that entered, in order of entry; this class translates between the two
numberings. The row of a *forced* token is added together with the row above it, and is as probable. Knows no draft source, no
clock and no budget.

Everything is on the host: a tree changes by a few rows at a time, for which a device is slower than Python. Rankings of the rows
to draft and to enter are computed on demand and last until the next verdict.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice, takewhile
from math import inf
from operator import attrgetter, itemgetter, neg
from typing import NamedTuple

from pipedec.decoding.acceptance import NO_LINE, Choices, Line
from pipedec.tree import Frontier, Gaps, RowChanges, Undrafted

_NOT_ENTERED = -1
_UNPROPOSED = -8.0  # the log-chance of a guessed token, given its row, that no source proposes when the row is drafted
_MIN_LOSS = 1e-4  # the log-chance of a choice is at least this much below its row's, so that no row is taken before its parent


@dataclass(slots=True, eq=False)
class _TreeRow:
    """A row of the tree."""

    token: int
    parent: _TreeRow | None
    log_chance: float  # of the path from the thread's first root on. Subtract the present root's.
    position: int
    gap: int = 0  # positions left empty after it
    index: int = 0  # in the tree
    number: int = _NOT_ENTERED  # in the stages' trees
    line: Line | None = None  # the choices below it; None until it is drafted or guessed
    is_drafted: bool = False
    taken: int = 0  # how many of these are rows
    best: float | None = None  # log-chance of the path to its most probable choice that is not yet a row; None if there is none
    forced: _TreeRow | None = None  # the row of the only token that may follow, if known
    children: dict[int, _TreeRow] = field(default_factory=dict)

    @property
    def next_position(self) -> int:
        """The position of its children."""
        return self.position + self.gap + 1

    def choice_at(self, place: int) -> float | None:
        """The log-chance of the path to a choice; None if there are not as many."""
        if self.line is None or place >= len(self.line.token_ids):
            return None
        return self.log_chance + min(self.line.log_chances[place], -_MIN_LOSS)


# A row, or a choice below a row: its cost, i.e. the root's log-chance minus its own; whether it is a choice; the row's index; the
# place of the choice among those below the row; the row. Lower entries come first.
_Entry = tuple[float, bool, int, int, _TreeRow]


class _Ranking:
    """Some rows of a tree, and the choices below all of its rows until they become rows, best first. Sorted on demand."""

    def __init__(self, rows: Iterable[_TreeRow], all_rows: Sequence[_TreeRow]) -> None:
        self._root = all_rows[0].log_chance if all_rows else 0.0
        self._sorted: list[_Entry] = []  # all come before those in the heap
        self._heap: list[_Entry] = [(self._root - row.log_chance, False, row.index, 0, row) for row in rows]
        self._heap += [(self._root - row.best, True, row.index, row.taken, row) for row in all_rows if row.best is not None]
        heapify(self._heap)

    def __iter__(self) -> Iterator[_Entry]:
        """All entries except choices that have become rows. None is removed."""
        position = 0
        while position < len(self._sorted) or self._sort_one():
            entry = self._sorted[position]
            position += 1
            _, is_choice, _, place, row = entry
            if not is_choice or place >= row.taken:
                yield entry

    def pop_best(self, count: int, max_cost: float = inf) -> list[_Entry]:
        """Remove and return the first ``count`` entries that cost at most ``max_cost``."""
        taken = list(islice(takewhile(lambda entry: entry[0] <= max_cost, self), count))
        if taken:
            del self._sorted[: bisect(self._sorted, taken[-1])]
        return taken

    def add_rows(self, rows: Iterable[_TreeRow]) -> None:
        for row in rows:
            self._add((self._root - row.log_chance, False, row.index, 0, row))

    def add_choices(self, row: _TreeRow) -> None:
        """Add the choices below a row that was just drafted."""
        if row.best is not None:
            self._add((self._root - row.best, True, row.index, row.taken, row))

    def _add(self, entry: _Entry | None) -> None:
        while entry is not None and self._sorted and entry < self._sorted[-1]:
            insort(self._sorted, entry)
            entry = self._next(entry)
        if entry is not None:
            heappush(self._heap, entry)

    def _sort_one(self) -> bool:
        """Move the first entry of the heap to the sorted ones. Returns whether there was one."""
        if not self._heap:
            return False
        entry = self._heap[0]
        following = self._next(entry)
        if following is None:
            heappop(self._heap)
        else:
            heapreplace(self._heap, following)
        self._sorted.append(entry)
        return True

    def _next(self, entry: _Entry) -> _Entry | None:
        """The next choice below the same row, which joins the heap when the one before it leaves."""
        _, is_choice, index, place, row = entry
        log_chance = row.choice_at(place + 1) if is_choice else None
        return None if log_chance is None else (self._root - log_chance, True, index, place + 1, row)


class Lesson(NamedTuple):
    """The observation that ``token`` was accepted after a drafted row, whose choices are row ``place`` of ``choices``."""

    choices: Choices
    place: int
    token: int


# Returns the tokens forced after a path of tokens below the root.
ChainBelow = Callable[[Sequence[int]], Sequence[int]]


class InjectionTree:
    """A prediction tree whose rows are drafted, and enter, in order of decreasing chance."""

    def __init__(self, chain_below: ChainBelow | None = None) -> None:
        self._chain_below = chain_below
        self.num_entered = 0  # rows that have entered the pipeline
        self.root_position = 0  # position id of the root, or of the next one
        self.gaps: Gaps | None = None  # positions left empty after rows; None if there are none
        self.log_probs: list[float] = []  # of the rows that entered last, each given its parent
        self._rows: list[_TreeRow] = []
        self._undrafted: _Ranking | None = None  # rows that are not drafted, and choices; None until needed
        self._not_entered: _Ranking | None = None  # rows that have not entered, and choices; None until needed

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def num_certain(self) -> int:
        """The number of rows among the root and its forced rows that have not entered yet."""
        row, count = self._rows[0] if self._rows else None, 0
        while row is not None:
            count += row.number == _NOT_ENTERED
            row = row.forced
        return count

    @property
    def is_exhausted(self) -> bool:
        """Whether every row was drafted and has entered, and every choice is a row."""
        return all(row.is_drafted and row.best is None and row.number != _NOT_ENTERED for row in self._rows)

    def tokens_of(self, rows: Sequence[int]) -> list[int]:
        """The token ids of ``rows``."""
        return [self._rows[row].token for row in rows]

    def positions_of(self, rows: Sequence[int]) -> list[int]:
        """The position ids of ``rows``."""
        return [self._rows[row].position for row in rows]

    def next_positions_of(self, rows: Sequence[int]) -> list[int]:
        """The position ids of the children of ``rows``."""
        return [self._rows[row].next_position for row in rows]

    def ancestors_of(self, row: int) -> list[int]:
        """``row`` itself, its parent, and so on up to the root."""
        found, above = list[int](), self._rows[row]
        while above.parent is not None:
            found.append(above.index)
            above = above.parent
        return [*found, above.index]

    def path(self, row: int) -> list[int]:
        """The tokens on the path from below the root to ``row``, inclusive."""
        tokens, above = list[int](), self._rows[row]
        while above.parent is not None:
            tokens.append(above.token)
            above = above.parent
        return tokens[::-1]

    def proposed(self, row: int) -> tuple[Line | None, float]:
        """The choices below ``row``, None until it is drafted or guessed; and the log-chance of its path from the root."""
        return self._rows[row].line, self._rows[row].log_chance - self._rows[0].log_chance

    def set_root_position(self, root_position: int, gap: int) -> None:
        """Set the position id of the root, or of the next one, and the number of positions left empty after it."""
        if self._rows:
            moved = root_position - self._rows[0].position
            self._rows[0].gap = gap
            for row in self._rows if moved else ():
                row.position += moved
        self.root_position = root_position

    def plant(self, token: int) -> None:
        """Make an accepted token the root of the empty tree. It has yet to be drafted and to enter."""
        self._append(_TreeRow(token, None, 0.0, self.root_position))
        self._undrafted = self._not_entered = None

    def undrafted_chances(self) -> Iterator[float]:
        """The log-chances of the rows that ``undrafted`` would return, best first."""
        return map(neg, map(itemgetter(0), self._ranked_undrafted()))

    def undrafted(self, count: int, min_log_chance: float = -inf) -> list[int]:
        """The ``count`` most probable rows that are not drafted, of at least this log-chance, ascending. ``add`` must follow."""
        ranked, found = self._ranked_undrafted(), list[int]()
        for _, is_choice, _, _, row in ranked.pop_best(count, -min_log_chance):
            if is_choice:
                row, *forced = new = self._taken(row)
                ranked.add_rows(forced)
                if self._not_entered is not None:
                    self._not_entered.add_rows(new)
            found.append(row.index)
        return sorted(found)

    def without_choices(self, count: int, min_log_chance: float) -> list[int]:
        """The ``count`` most probable rows that are neither drafted nor guessed, of at least this log-chance, ascending."""
        ranked, found = self._ranked_undrafted(), list[int]()
        probable = takewhile(lambda entry: entry[0] <= -min_log_chance, ranked)
        for _, is_choice, _, _, row in list(islice((one for one in probable if one[1] or one[-1].line is None), count)):
            if is_choice:
                new = self._taken(row)
                ranked.add_rows(new)
                if self._not_entered is not None:
                    self._not_entered.add_rows(new)
                row = new[0]
            found.append(row.index)
        return sorted(found)

    def frontier(self, rows: Sequence[int], count: int) -> Frontier:
        """The ``count`` best rows and choices that may follow ``rows``, the last ``undrafted``, besides their choices."""
        left = islice(self._ranked_undrafted() if count else (), count)
        undrafted = [
            Undrafted(row.choice_at(place) or 0.0, row.index, place, row.line.token_ids[place], None)
            if is_choice and row.line is not None
            else Undrafted(row.log_chance, -1 if row.parent is None else row.parent.index, 0, row.token, row.index)
            for _, is_choice, _, place, row in left
        ]
        log_chances = [self._rows[row].log_chance for row in rows]
        return Frontier(self._rows[0].log_chance, self.num_rows, log_chances, undrafted, _MIN_LOSS)

    def guess(self, rows: Sequence[int], lines: Sequence[Line]) -> None:
        """Add choices below rows ``without_choices``, which hold until the rows are drafted."""
        for row, line in zip(rows, lines, strict=True):
            if self._rows[row].forced is None:
                self._add_choices(self._rows[row], line)

    def add(self, rows: Sequence[int], lines: Sequence[Line]) -> None:
        """Add the choices below rows that were just drafted. A row with a forced token below it has none."""
        for row, line in zip(rows, lines, strict=True):
            drafted = self._rows[row]
            drafted.is_drafted = True
            if drafted.forced is not None:
                drafted.line = NO_LINE
            elif drafted.line is not None:
                self._replace_choices(drafted, line)
            else:
                self._add_choices(drafted, line)

    def choices_below(self, row: int) -> list[float]:
        """The log-chances of the choices below a row that are no rows yet, best first."""
        above, chances = self._rows[row], list[float]()
        while (log_chance := above.choice_at(above.taken + len(chances))) is not None:
            chances.append(log_chance)
        return chances

    def add_best_below(self, row: int) -> list[int]:
        """Make the best choice below ``row`` a row; returns it and the rows forced after it."""
        self._undrafted = self._not_entered = None
        return [new.index for new in self._taken(self._rows[row])]

    def drop_choices(self) -> None:
        """Let no more choices become rows."""
        self._undrafted = self._not_entered = None
        for row in self._rows:
            row.best = None

    def _add_choices(self, row: _TreeRow, line: Line) -> None:
        row.line = line
        row.best = row.choice_at(0)
        for ranking in (self._undrafted, self._not_entered):
            if ranking is not None:
                ranking.add_choices(row)

    def _replace_choices(self, row: _TreeRow, line: Line) -> None:
        """Replace guessed choices. Those that have become rows stay, with their new chances."""
        chances = dict(zip(line.token_ids, line.log_chances, strict=False))
        for token, child in row.children.items():
            log_chance = row.log_chance + min(chances.pop(token, _UNPROPOSED), -_MIN_LOSS)
            moved, changed = [child], log_chance - child.log_chance
            for below in moved:
                below.log_chance += changed
                below.best = None if below.best is None else below.best + changed
                moved += below.children.values()
        row.line = Line(list(chances), list(chances.values()), line.choices, line.place)
        row.taken, row.best = 0, row.choice_at(0)
        self._undrafted = self._not_entered = None

    def entering_chances(self) -> Iterator[float]:
        """The log-chances of the rows that ``enter`` would take, best first."""
        ranked = self._ranked_not_entered()
        return map(neg, map(itemgetter(0), ranked)) if self._chain_below is None else self._with_chains(ranked, self._chain_below)

    def _with_chains(self, ranked: _Ranking, chain_below: ChainBelow) -> Iterator[float]:
        """The log-chances of ``ranked``, and of the tokens forced after its choices."""
        for cost, is_choice, _, place, row in ranked:
            yield -cost
            if is_choice:
                assert row.line is not None
                chain = chain_below([*self.path(row.index), row.line.token_ids[place]])
                yield from (-cost - count * _MIN_LOSS for count in range(1, len(chain) + 1))

    def enter(self, count: int) -> tuple[list[int], list[int]]:
        """Let the ``count`` most probable rows enter. Returns their token ids, and their parents in the stages' trees."""
        ranked = self._ranked_not_entered()
        rows, taken = list[_TreeRow](), list[_TreeRow]()
        while (room := count - len(rows) - len(taken)) > 0 and (
            found := ranked.pop_best(room if self._chain_below is None else 1)  # a choice enters with the tokens forced after it
        ):
            for _, is_choice, _, _, row in found:
                if is_choice:
                    taken += self._taken(row)
                else:
                    rows.append(row)
        if self._undrafted is not None:
            self._undrafted.add_rows(taken)
        rows = [*sorted(rows, key=attrgetter("index")), *taken]
        ranked.add_rows(rows[count:])
        del rows[count:]
        for number, row in enumerate(rows, start=self.num_entered):
            row.number = number
        self.num_entered += len(rows)
        self.log_probs = [0.0 if row.parent is None else row.log_chance - row.parent.log_chance for row in rows]
        return [row.token for row in rows], [-1 if row.parent is None else row.parent.number for row in rows]

    def advance_to(self, tokens: Sequence[int]) -> tuple[RowChanges, bool, list[Lesson]]:
        """Accept ``tokens``. Returns the changes; whether the last token was a row, so that its subtree remains; and the lessons.
        Raises ValueError if another token is not a row, so the verdict belongs to another tree.
        """
        committed: list[_TreeRow] = []
        row = self._rows[0] if self._rows else None
        for token in tokens:
            if row is None and (committed or len(tokens) > 1):
                raise ValueError(f"verdict {list(tokens)} does not follow the tree")
            if row is not None:
                committed.append(row)
                row = row.children.get(token)
        lessons = [
            Lesson(above.line.choices, above.line.place, token)
            for above, token in zip(committed, tokens, strict=False)
            if above.is_drafted and above.line is not None and above.line.choices is not None
        ]
        return self._keep(committed, row), row is not None, lessons

    def cut(self) -> RowChanges:
        """Drop all rows."""
        return self._keep([], None)

    def _keep(self, committed: list[_TreeRow], root: _TreeRow | None) -> RowChanges:
        """Commit some rows, a path from the root, and drop all others but the subtree of ``root``."""
        num_rows, kept = len(self._rows), list[_TreeRow]()
        if root is not None:
            root.parent = None
            self.root_position = root.position
            kept.append(root)
            for row in kept:
                kept += row.children.values()
            kept.sort(key=attrgetter("index"))
        elif committed:
            self.root_position = committed[-1].next_position
        changes = RowChanges(
            [row.index for row in committed], [row.token for row in committed], [row.index for row in kept], num_rows
        )
        self._rows = kept
        self._undrafted = self._not_entered = None
        for index, row in enumerate(kept):
            row.index = index
        entered = sorted((row for row in kept if row.number != _NOT_ENTERED), key=attrgetter("number"))
        self.num_entered = len(entered)
        for number, row in enumerate(entered):
            row.number = number
        return changes

    def _ranked_undrafted(self) -> _Ranking:
        if self._undrafted is None:
            self._undrafted = _Ranking([row for row in self._rows if not row.is_drafted], self._rows)
        return self._undrafted

    def _ranked_not_entered(self) -> _Ranking:
        if self._not_entered is None:
            self._not_entered = _Ranking([row for row in self._rows if row.number == _NOT_ENTERED], self._rows)
        return self._not_entered

    def _taken(self, row: _TreeRow) -> list[_TreeRow]:
        """Make the most probable choice below ``row`` a row. Returns it and the rows forced after it."""
        assert row.line is not None and row.best is not None
        token = row.line.token_ids[row.taken]
        below = row.children[token] = _TreeRow(token, row, row.best, row.next_position)
        row.taken += 1
        row.best = row.choice_at(row.taken)
        if self.gaps is not None and self.gaps.may_follow(token):
            below.gap = self.gaps.after([*self.path(row.index), token])
        return self._append(below)

    def _append(self, row: _TreeRow) -> list[_TreeRow]:
        """Add ``row`` and the rows forced after it; returns them."""
        row.index = len(self._rows)
        self._rows.append(row)
        new = [row]
        for token in () if self._chain_below is None else self._chain_below(self.path(row.index)):
            below = _TreeRow(token, row, row.log_chance - _MIN_LOSS, row.next_position)
            below.index = len(self._rows)
            self._rows.append(below)
            row.forced = row.children[token] = below
            new.append(below)
            row = below
        return new
