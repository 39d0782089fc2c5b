"""Free blocks of slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class FreeRuns:
    """The free blocks: at first 0 to ``total`` − 1. Later ``total`` is their number."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._lengths = {0: total}  # by the first block of each run
        self._firsts = {total: 0}  # the first block of each run, by the block after its last

    def allocate(self, number: int, after: int | None = None) -> list[int]:
        """Take ``number`` blocks, in one run if possible: the one that follows block ``after``, else the smallest that suffices.

        Raises ValueError if fewer are free.
        """
        if number > self.total:
            raise ValueError(f"{number} blocks were asked for, but {self.total} are free")
        taken: list[int] = []
        while missing := number - len(taken):
            start = -1 if after is None else after + 1
            if self._lengths.get(start, 0) < missing:
                fitting = [(length, first) for first, length in self._lengths.items() if length >= missing]
                if fitting:
                    start = min(fitting)[1]
                elif start not in self._lengths:
                    start = max(self._lengths, key=lambda first: self._lengths[first])
            length = self._lengths.pop(start)
            del self._firsts[start + length]
            if length > missing:
                self._lengths[start + missing] = length - missing
                self._firsts[start + length] = start + missing
            taken += range(start, start + min(length, missing))
            after = taken[-1]
        self.total -= number
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Free these blocks. Their runs are merged with their neighbours."""
        for start, length in runs_of(sorted(blocks)):
            self.total += length
            length += self._lengths.pop(start + length, 0)
            first = self._firsts.pop(start, start)
            self._lengths[first] = self._lengths.get(first, 0) + length
            self._firsts[start + length] = first


def runs_of(blocks: Iterable[int], size: int = 1) -> Iterator[tuple[int, int]]:
    """The runs of consecutive ``blocks``, in order: (first, number) of each, in slots if ``size`` is the slots of a block."""
    start, length = 0, 0
    for block in blocks:
        if length and block == start + length:
            length += 1
            continue
        if length:
            yield start * size, length * size
        start, length = block, 1
    if length:
        yield start * size, length * size
