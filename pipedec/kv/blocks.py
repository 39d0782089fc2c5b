"""The blocks of the KV pools: which of them are free, and which hold which tokens. Knows neither slots nor requests.

Free blocks are kept as runs of consecutive ones: blocks may be very many, but runs are few.

Known tokens are a tree in which each block follows the block with the tokens before its own: the blocks on the way from the root
to a block hold a prefix of some request. Requests that run use whole ways; what nobody uses is kept until its memory is needed,
least recently used first, and never before the blocks behind it. A block that is not full ends a prefix: only a request that has
ended leaves one.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice, takewhile
from typing import NamedTuple

_MOST_COMPARED = 64  # blocks that may hold the beginning of what is looked for, the latest ones


class FreeRuns:
    """Blocks 0 to ``total`` − 1, all of them free at first.

    Attributes:
        total: number of free blocks.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._lengths = {0: total}  # by the first block of each run
        self._starts = [0]  # ascending

    def take(self, number: int, behind: int | None = None) -> list[int]:
        """Take ``number`` blocks, in one run if possible: the one that follows block ``behind``, else the smallest that suffices.

        Raises:
            ValueError: fewer are free.
        """
        if number > self.total:
            raise ValueError(f"{number} blocks were asked for, but {self.total} are free")
        taken: list[int] = []
        while missing := number - len(taken):
            start = self._choose(missing, -1 if behind is None else behind + 1)
            length, place = self._lengths.pop(start), bisect(self._starts, start) - 1
            if length > missing:
                self._starts[place] = start + missing
                self._lengths[start + missing] = length - missing
            else:
                del self._starts[place]
            taken += range(start, start + min(length, missing))
            behind = taken[-1]
        self.total -= number
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """These blocks are free again. Their runs are merged with their neighbours."""
        for start, length in runs_of(sorted(blocks)):
            self.total += length
            place = bisect(self._starts, start)
            if place < len(self._starts) and self._starts[place] == start + length:
                length += self._lengths.pop(self._starts.pop(place))
            before = self._starts[place - 1] if place else None
            if before is not None and before + self._lengths[before] == start:
                self._lengths[before] += length
            else:
                self._starts.insert(place, start)
                self._lengths[start] = length

    def _choose(self, number: int, next_start: int) -> int:
        """The first block of the run from which to take."""
        follows = next_start in self._lengths
        if follows and self._lengths[next_start] >= number:
            return next_start
        fitting = [(length, start) for start, length in self._lengths.items() if length >= number]
        if fitting:
            return min(fitting)[1]
        return next_start if follows else max(self._lengths, key=lambda start: self._lengths[start])


def runs_of(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first block, number of blocks) of consecutive ``blocks``, in their order."""
    start, length = 0, 0
    for block in blocks:
        if length and block == start + length:
            length += 1
            continue
        if length:
            yield start, length
        start, length = block, 1
    if length:
        yield start, length


@dataclass(eq=False, slots=True)
class KnownBlock:
    """A block whose tokens are known.

    Attributes:
        tokens: that it holds, behind those of its parents.
        block: where.
        users: running requests with this prefix.
        used_at: when the last of them left.
    """

    tokens: tuple[int, ...]
    block: int
    parent: KnownBlock | None
    children: dict[tuple[int, ...], KnownBlock] = field(default_factory=dict)
    users: int = 0
    used_at: int = 0

    @property
    def may_go(self) -> bool:
        """Whether it is known, nobody uses it, and nothing follows it."""
        return self.parent is not None and not self.users and not self.children


class Found(NamedTuple):
    """A known prefix.

    Attributes:
        path: its full blocks, in order.
        source: a block that begins with the ``num_more`` tokens behind them; None if there are none.
    """

    path: list[KnownBlock]
    source: KnownBlock | None = None
    num_more: int = 0


class Prefixes:
    """The tree of known tokens.

    Args:
        block: tokens of a full block.

    Attributes:
        num_kept: blocks that no running request uses.
    """

    def __init__(self, block: int) -> None:
        self.num_kept = 0
        self._block = block
        self._root = KnownBlock((), -1, None)
        self._leaving: list[tuple[int, int, KnownBlock]] = []  # a heap of (used_at, order, block), many of them outdated
        self._order = count()
        self._time = 0

    def find(self, token_ids: Sequence[int]) -> Found:
        """The longest known prefix of ``token_ids``."""
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
            if (common := _common(known.tokens, rest)) > most:
                source, most = known, common
        return Found(path, source, most)

    def use(self, known: Iterable[KnownBlock]) -> None:
        """A running request has these blocks."""
        for one in known:
            self.num_kept -= not one.users
            one.users += 1

    def leave(self, path: Iterable[KnownBlock]) -> None:
        """The request with these blocks, a way from the root, has ended."""
        self._time += 1
        for one in path:
            one.users -= 1
            one.used_at = self._time
            self.num_kept += not one.users
            self._may_leave(one)

    def add(self, path: Sequence[KnownBlock], tokens: tuple[int, ...], block: int) -> KnownBlock:
        """``block`` holds the tokens behind ``path``. Returns what is known to hold them, which may be another block."""
        parent = path[-1] if path else self._root
        known = parent.children.get(tokens)
        if known is None:
            known = parent.children[tokens] = KnownBlock(tokens, block, parent)
            self.num_kept += 1
        return known

    def forget(self, known: KnownBlock) -> int:
        """Forget a block that nobody uses and that no block follows. Returns where it is."""
        assert known.parent is not None
        del known.parent.children[known.tokens]
        self.num_kept -= 1
        self._may_leave(known.parent)
        known.parent = None
        return known.block

    def evict(self) -> int:
        """Forget the block that was not used for the longest time. Returns where it is.

        Raises:
            IndexError: all blocks are in use.
        """
        while True:
            used_at, _, known = heappop(self._leaving)
            if known.may_go and known.used_at == used_at:
                return self.forget(known)

    def _may_leave(self, known: KnownBlock) -> None:
        if not known.may_go:
            return
        if len(self._leaving) > 2 * self.num_kept + 64:
            self._leaving = [entry for entry in self._leaving if entry[2].may_go and entry[2].used_at == entry[0]]
            heapify(self._leaving)
        heappush(self._leaving, (known.used_at, next(self._order), known))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of leading tokens that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
