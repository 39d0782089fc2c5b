"""Which blocks are free, as runs of consecutive ones: blocks may be very many, but runs are few. Knows no contents."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator


class FreeRuns:
    """Blocks 0 to ``total`` − 1, all of them free at first.

    Attributes:
        total: number of free blocks.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._lengths = {0: total}  # by the first block of each run
        self._starts = [0]  # ascending

    def take(self, count: int, behind: int | None = None) -> list[int]:
        """Take ``count`` blocks, in one run if possible: the one that follows block ``behind``, else the smallest that suffices.

        Raises:
            ValueError: fewer are free.
        """
        if count > self.total:
            raise ValueError(f"{count} blocks were asked for, but {self.total} are free")
        taken: list[int] = []
        while len(taken) < count:
            start = self._choose(count - len(taken), -1 if behind is None else behind + 1)
            taken += self._cut(start, count - len(taken))
            behind = taken[-1]
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """These blocks are free again."""
        for start, length in runs_of(sorted(blocks)):
            self._add(start, length)

    def _choose(self, count: int, next_start: int) -> int:
        """The first block of the run from which to take."""
        follows = next_start in self._lengths
        if follows and self._lengths[next_start] >= count:
            return next_start
        fitting = [(length, start) for start, length in self._lengths.items() if length >= count]
        if fitting:
            return min(fitting)[1]
        return next_start if follows else max(self._lengths, key=lambda start: self._lengths[start])

    def _cut(self, start: int, most: int) -> range:
        """Take up to ``most`` blocks from the beginning of a run."""
        length = self._lengths.pop(start)
        place = bisect(self._starts, start) - 1
        if length > most:
            self._starts[place] = start + most
            self._lengths[start + most] = length - most
        else:
            del self._starts[place]
        taken = range(start, start + min(length, most))
        self.total -= len(taken)
        return taken

    def _add(self, start: int, length: int) -> None:
        """Add a run, and merge it with its neighbours."""
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
