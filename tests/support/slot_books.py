"""Slots of KV pools for tests of stages without a rank 0: which request has which, at random places or one after another."""

from __future__ import annotations

import random
from collections import defaultdict

from pipedec.core.stage_message import SlotRuns


class SlotAllocator:
    """The slots of pools of one size.

    Args:
        rng: chooses blocks at random; None takes the first free ones.
        keeps: nobody gets a request's slots after its end.
    """

    def __init__(self, slots: int, block: int, rng: random.Random | None = None, keeps: bool = False) -> None:
        self._keeps = keeps
        self.block = block
        self._free = list(range(slots // block))
        self._taken: dict[int, list[int]] = defaultdict(list)
        self._rng = rng

    @property
    def num_taken(self) -> int:
        """Requests that have slots."""
        return len(self._taken)

    def runs(self, number: int, slots: int) -> SlotRuns:
        """The blocks in which the first ``slots`` slots of a request are."""
        return tuple((block * self.block, self.block) for block in self._taken[number][: -(-slots // self.block)])

    def take(self, number: int, slots: int) -> SlotRuns:
        """Further slots for a request, so that it has at least ``slots``."""
        missing = -(-slots // self.block) - len(self._taken[number])
        blocks = [self._next() for _ in range(missing)]
        self._taken[number] += blocks
        return tuple((block * self.block, self.block) for block in blocks)

    def free(self, number: int) -> None:
        """Take back all slots of a request."""
        if not self._keeps:
            self._free = sorted(self._free + self._taken.pop(number, []))

    def _next(self) -> int:
        return self._free.pop(0 if self._rng is None else self._rng.randrange(len(self._free)))
