"""The tree of blocks with known tokens, and the snapshots of states after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice, takewhile

_MOST_COMPARED = 64  # latest blocks that are compared with the beginning of a prompt


@dataclass(eq=False, slots=True)
class KnownBlock:
    """A block whose tokens are known.

    Attributes:
        tokens: those that follow its parent's.
        block: its index in the pool.
        users: number of running requests with this prefix.
        used_at: when the last of them left; −1 while there are any, and once the block is forgotten.
    """

    tokens: tuple[int, ...]
    block: int
    parent: KnownBlock | None
    children: dict[tuple[int, ...], KnownBlock] = field(default_factory=dict)
    users: int = 0
    used_at: int = -1


class Snapshots:
    """The places for snapshots of the states of recurrent layers, 0 to ``total`` − 1.

    A place is free, or promised to a running request, or it has the states after a known block. These are dropped with the block,
    or before, when the place is needed: then the least recently used ones go first.
    """

    def __init__(self, total: int) -> None:
        self._free = list(reversed(range(total)))
        self._places: dict[KnownBlock, int] = {}  # the least recently used one first

    def deepest(self, path: Sequence[KnownBlock]) -> int:
        """The number of blocks up to the last one of ``path`` with a snapshot; 0 if there is none."""
        return next((number for number in range(len(path), 0, -1) if path[number - 1] in self._places), 0)

    def use(self, known: KnownBlock) -> int | None:
        """The place of the snapshot after ``known``, which becomes the most recently used one; None if there is none."""
        place = self._places.pop(known, None)
        if place is not None:
            self._places[known] = place
        return place

    def take(self, adopted: int | None) -> int | None:
        """Take a place, if necessary that of the least recently used snapshot, but not ``adopted``. None if there is no other."""
        if not self._free:
            known = next((known for known, place in self._places.items() if place != adopted), None)
            if known is None:
                return None
            self.drop(known)
        return self._free.pop()

    def give(self, place: int) -> None:
        """Free a place that was taken."""
        self._free.append(place)

    def keep(self, known: KnownBlock, place: int) -> None:
        """Note that a place that was taken has the states after ``known``. It is freed if another one has them."""
        if known in self._places:
            self.give(place)
        else:
            self._places[known] = place

    def drop(self, known: KnownBlock) -> None:
        """Free the place of the snapshot after ``known``, if there is one."""
        if (place := self._places.pop(known, None)) is not None:
            self.give(place)

    def drop_all(self) -> None:
        """Free the places of all snapshots. Those that are promised stay so."""
        self._free += self._places.values()
        self._places.clear()


class Prefixes:
    """The tree of blocks with known tokens, ``block`` tokens in a full one.

    Attributes:
        num_kept: blocks that no running request uses.
        snapshots: the states that are kept for these blocks.
    """

    def __init__(self, block: int, snapshots: Snapshots) -> None:
        self.num_kept = 0
        self.snapshots = snapshots
        self._block = block
        self._root = KnownBlock((), -1, None)
        self._leaving: list[tuple[int, int, KnownBlock]] = []  # a heap of (used_at, order, block), many of them outdated
        self._order = count()
        self._time = 0

    def find(self, token_ids: Sequence[int]) -> tuple[list[KnownBlock], KnownBlock | None, int]:
        """The longest known prefix of ``token_ids``.

        Returns:
            its full blocks, in order; a block that begins with the next tokens, or None; and the number of these tokens.
        """
        path: list[KnownBlock] = []
        last, first = self._root, 0
        while (end := first + self._block) <= len(token_ids):
            known = last.children.get(tuple(token_ids[first:end]))
            if known is None:
                break
            path.append(known)
            last, first = known, end
        source, most = None, 0
        rest = token_ids[first : first + self._block]
        for known in islice(reversed(last.children.values()), _MOST_COMPARED):
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known.tokens, rest, strict=False)))
            if common > most:
                source, most = known, common
        return path, source, most

    def end_of(self, path: Sequence[KnownBlock], tokens: Sequence[int]) -> KnownBlock | None:
        """The block in which the whole blocks of ``tokens`` after ``path`` end; None if not all of them are known."""
        known: KnownBlock | None = path[-1] if path else self._root
        for first in range(0, len(tokens), self._block):
            known = None if known is None else known.children.get(tuple(tokens[first : first + self._block]))
        return known

    def use(self, known: Iterable[KnownBlock]) -> None:
        for one in known:
            self.num_kept -= not one.users
            one.users += 1
            one.used_at = -1

    def leave(self, path: Sequence[KnownBlock]) -> None:
        """Note that the request with these blocks, each the parent of the next, has ended."""
        self._time += 1
        for one in path:
            one.users -= 1
            if not one.users:
                self.num_kept += 1
                one.used_at = self._time
        if path:
            self._may_leave(path[-1])

    def add(self, path: Sequence[KnownBlock], tokens: tuple[int, ...], block: int) -> KnownBlock:
        """Note that ``block`` holds the ``tokens`` after ``path``. Returns the block known for them, perhaps another one."""
        parent = path[-1] if path else self._root
        known = parent.children.get(tokens)
        if known is None:
            known = parent.children[tokens] = KnownBlock(tokens, block, parent)
            self.num_kept += 1
        return known

    def forget(self, known: KnownBlock) -> int:
        """Forget a block without users and children. Returns its index in the pool."""
        assert known.parent is not None
        del known.parent.children[known.tokens]
        self.snapshots.drop(known)
        self.num_kept -= 1
        known.used_at = -1
        self._may_leave(known.parent)
        return known.block

    def evict(self) -> int:
        """Forget the least recently used block. Returns its index in the pool. Raises IndexError if all are in use."""
        while True:
            used_at, _, known = heappop(self._leaving)
            if known.used_at == used_at:
                return self.forget(known)

    def _may_leave(self, known: KnownBlock) -> None:
        """Let a block be evicted from now on, unless it has users or children."""
        if known is self._root or known.users or known.children:
            return
        if len(self._leaving) > 2 * self.num_kept + 64:
            self._leaving = [entry for entry in self._leaving if entry[2].used_at == entry[0]]
            heapify(self._leaving)
        heappush(self._leaving, (known.used_at, next(self._order), known))
