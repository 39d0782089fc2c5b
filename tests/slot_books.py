"""Slots of KV pools for tests of stages without a rank 0: which request has which, at random places or one after another."""

from __future__ import annotations

import random
from collections import defaultdict

from pipedec.core import SlotRuns


class SlotBooks:
    """The slots of pools of one size.

    Args:
        rng: chooses blocks at random; None takes the first free ones.
    """

    def __init__(self, slots: int, block: int, rng: random.Random | None = None) -> None:
        self._block = block
        self._free = list(range(slots // block))
        self._taken: dict[int, list[int]] = defaultdict(list)
        self._rng = rng

    @property
    def num_taken(self) -> int:
        """Requests that have slots."""
        return len(self._taken)

    def slots_of(self, number: int) -> set[int]:
        """The pool's slots that a request has."""
        return {block * self._block + slot for block in self._taken[number] for slot in range(self._block)}

    def take(self, number: int, slots: int) -> SlotRuns:
        """Further slots for a request, so that it has at least ``slots``."""
        missing = -(-slots // self._block) - len(self._taken[number])
        blocks = [self._next() for _ in range(missing)]
        self._taken[number] += blocks
        return tuple((block * self._block, self._block) for block in blocks)

    def free(self, number: int) -> None:
        """Take back all slots of a request."""
        self._free = sorted(self._free + self._taken.pop(number, []))

    def _next(self) -> int:
        return self._free.pop(0 if self._rng is None else self._rng.randrange(len(self._free)))
