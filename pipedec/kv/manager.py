"""The KV memory of a pipeline as rank 0 keeps its books: slots for requests, and prefixes that requests share.

Every stage has a pool of as many slots, and gets the same slots for a request. So one decision on rank 0 is enough, and stages
neither search nor count. Slots are handed out in blocks. The blocks of a request that has ended keep their tokens until they are
needed, least recently used first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipedec.core import SlotRuns


@dataclass(frozen=True)
class Lease:
    """What a request gets when it opens; see the attributes of the same names of ``Opening``."""

    slots: SlotRuns
    cached: int = 0
    copied: tuple[int, int] = (0, 0)


class KVManager:
    """The slots of a pipeline's KV pools.

    Args:
        capacity: slots of each stage's pool; rounded down to whole blocks.
        block: slots that are handed out together.
        shares_prefixes: let requests adopt prefixes that other requests, running or ended, hold.

    Attributes:
        queried_tokens: tokens of all requests opened so far that might have been adopted.
        adopted_tokens: those of them that were.

    Raises:
        ValueError: there is not one block.
    """

    def __init__(self, capacity: int, block: int = 16, shares_prefixes: bool = True) -> None:
        raise NotImplementedError

    @property
    def capacity(self) -> int:
        """Slots in all blocks."""
        raise NotImplementedError

    @property
    def used_slots(self) -> int:
        """Slots of running requests; shared ones count once."""
        raise NotImplementedError

    @property
    def kept_slots(self) -> int:
        """Slots that hold prefixes of ended requests, and are free for whoever needs them."""
        raise NotImplementedError

    def open(self, number: int, token_ids: Sequence[int], slots: int) -> Lease | None:
        """Give a request ``slots`` slots in all, those of the longest known prefix among them.

        Args:
            token_ids: what will enter first: prompt, and what was said before. At least the last one is never adopted.

        Returns:
            None if there is no room now.
        """
        raise NotImplementedError

    def grow(self, number: int, slots: int) -> SlotRuns | None:
        """Give a request further slots, so that it has at least ``slots``; empty if it has, None if there is no room now."""
        raise NotImplementedError

    def slots_of(self, number: int) -> int:
        """Slots that a request has; 0 if it is not open."""
        raise NotImplementedError

    def most_for(self, number: int) -> int:
        """Slots that a request could have if it took all that are free."""
        raise NotImplementedError

    def extend(self, number: int, token_ids: Sequence[int]) -> None:
        """The next slots of a request, from slot ``cached`` of its lease on, hold these tokens from the next timestep on."""
        raise NotImplementedError

    def close(self, number: int) -> None:
        """A request has ended or is paused. Its slots are free, but the tokens that ``extend`` told of may still be adopted."""
        raise NotImplementedError
