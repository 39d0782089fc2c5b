"""The KV memory of a pipeline as rank 0 keeps its books: slots for requests, and prefixes that requests share.

Every stage has a pool of as many slots, and gets the same slots for a request. So one decision on rank 0 is enough, and stages
neither search nor count. Slots are handed out in blocks. The blocks of a request that has ended keep their tokens until they are
needed, least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipedec.core import SlotRuns
from pipedec.kv.prefixes import Found, KnownBlock, Prefixes
from pipedec.kv.runs import FreeRuns, runs_of


@dataclass(frozen=True)
class Lease:
    """What a request gets when it opens; see the attributes of the same names of ``Opening``."""

    slots: SlotRuns
    cached: int = 0
    copied: tuple[int, int] = (0, 0)


@dataclass
class _Holder:
    """A running request.

    Attributes:
        blocks: in the order of its slots.
        path: the known ones among its first blocks.
        rest: its tokens behind those.
        is_double: the block behind ``path`` is known, but as that of another running request.
    """

    blocks: list[int]
    path: list[KnownBlock]
    rest: list[int]
    is_double: bool = False

    def own(self) -> list[int]:
        """Blocks that are not known, and so nobody else's."""
        known = [one.block for one in self.path]
        return [block for block, other in zip(self.blocks, known, strict=False) if block != other] + self.blocks[len(known) :]


@dataclass(frozen=True)
class _Plan:
    """How a request would open.

    Attributes:
        num_new: blocks that it needs beside those of the prefix.
        takes_over: the last block of the prefix is not full, and nobody else's: the request goes on in it.
    """

    found: Found
    num_new: int
    takes_over: bool = False


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
        if block < 1 or capacity < block:
            raise ValueError(f"{capacity} slots are not one block of {block}")
        self.block = block
        self.shares_prefixes = shares_prefixes
        self.queried_tokens = 0
        self.adopted_tokens = 0
        self._num_blocks = capacity // block
        self.clear()

    def clear(self) -> None:
        """The stages have lost what is in their pools: no request is open, and no prefix is known."""
        self._free = FreeRuns(self._num_blocks)
        self._prefixes = Prefixes(self.block)
        self._holders: dict[int, _Holder] = {}

    @property
    def capacity(self) -> int:
        """Slots in all blocks."""
        return self._num_blocks * self.block

    @property
    def used_slots(self) -> int:
        """Slots of running requests; shared ones count once."""
        return self.capacity - self.free_slots

    @property
    def kept_slots(self) -> int:
        """Slots that hold prefixes of ended requests, and are free for whoever needs them."""
        return self._prefixes.num_kept * self.block

    @property
    def free_slots(self) -> int:
        """Slots that no running request has, those that are kept among them."""
        return self._num_available * self.block

    @property
    def _num_available(self) -> int:
        return self._free.total + self._prefixes.num_kept

    def cached_for(self, token_ids: Sequence[int], slots: int) -> int | None:
        """How many tokens ``open`` would find cached now; None if there is no room."""
        plan = self._plan(token_ids, slots)
        return None if plan is None else self._cached(plan)

    def open(self, number: int, token_ids: Sequence[int], slots: int) -> Lease | None:
        """Give a request ``slots`` slots in all, those of the longest known prefix among them.

        Args:
            token_ids: what will enter first: prompt, and what was said before. At least the last one is never adopted.

        Returns:
            None if there is no room now.

        Raises:
            ValueError: the request is open already.
        """
        if number in self._holders:
            raise ValueError(f"request {number} is open already")
        plan = self._plan(token_ids, slots)
        if plan is None:
            return None
        cached = self._cached(plan)
        if self.shares_prefixes:
            self.queried_tokens += max(len(token_ids) - 1, 0)
            self.adopted_tokens += cached
        path, source, num_more = plan.found
        blocks = self._blocks_for(plan)
        self._holders[number] = _Holder(blocks, path, list(token_ids[len(path) * self.block : cached]))
        copied = (source.block * self.block, num_more) if source is not None and not plan.takes_over else (0, 0)
        return Lease(self._slots(blocks), cached, copied)

    def grow(self, number: int, slots: int) -> SlotRuns | None:
        """Give a request further slots, so that it has at least ``slots``; empty if it has, None if there is no room now."""
        blocks = self._holders[number].blocks
        more = self._num_blocks_for(slots) - len(blocks)
        if more <= 0:
            return ()
        if more > self._num_available:
            return None
        new = self._take(more, blocks[-1] if blocks else None)
        blocks += new
        return self._slots(new)

    def slots_of(self, number: int) -> int:
        """Slots that a request has; 0 if it is not open."""
        return len(self._holders[number].blocks) * self.block if number in self._holders else 0

    def tokens_of(self, number: int) -> int:
        """Tokens that are known to be in the first slots of a request, which is open."""
        holder = self._holders[number]
        return len(holder.path) * self.block + len(holder.rest)

    def extend(self, number: int, token_ids: Sequence[int]) -> None:
        """The next slots of a request, from slot ``cached`` of its lease on, hold these tokens from the next timestep on.

        Raises:
            ValueError: it has fewer slots.
        """
        holder = self._holders[number]
        if not self.shares_prefixes:
            return
        holder.rest += token_ids
        if self.tokens_of(number) > self.slots_of(number):
            raise ValueError(f"request {number} has {self.slots_of(number)} slots, too few for its tokens")
        if not holder.is_double:
            holder.is_double = not self._make_known(holder)

    def close(self, number: int) -> None:
        """A request has ended or is paused. Its slots are free, but the tokens that ``extend`` told of may still be adopted."""
        holder = self._holders.pop(number)
        self._make_known(holder, has_ended=True)
        own = holder.own()
        if holder.rest:
            known = self._prefixes.add(holder.path, tuple(holder.rest), holder.blocks[len(holder.path)])
            self._prefixes.touch(known)
            own = [one for one in own if one != known.block]
        self._prefixes.leave(holder.path)
        self._free.give(own)

    def forget_kept(self) -> None:
        """Forget all prefixes that nobody uses: what is in their slots may be wrong."""
        while self._prefixes.num_kept:
            self._free.give([self._prefixes.evict()])

    def _make_known(self, holder: _Holder, has_ended: bool = False) -> bool:
        """Let others know the full blocks behind the holder's path.

        Returns:
            whether all were made known. A block whose tokens another running request has, too, is not, before this one has ended.
        """
        full = len(holder.rest) - len(holder.rest) % self.block
        for first in range(0, full, self.block):
            block = holder.blocks[len(holder.path)]
            known = self._prefixes.add(holder.path, tuple(holder.rest[first : first + self.block]), block)
            if known.users and not has_ended:
                del holder.rest[:first]
                return False
            if not known.users and known.block != block:
                self._free.give([known.block])
                known.block = block
            self._prefixes.use([known])
            holder.path.append(known)
        del holder.rest[:full]
        return True

    def _plan(self, token_ids: Sequence[int], slots: int) -> _Plan | None:
        """How to open a request; None if there is no room."""
        found = self._prefixes.find(token_ids[:-1]) if self.shares_prefixes else Found([])
        path, source, num_more = found
        num_new = max(self._num_blocks_for(slots), len(path)) - len(path)
        available = self._num_available - sum(not known.users for known in path)
        if source is not None and len(source.tokens) == num_more < self.block and num_new:
            return _Plan(found, num_new - 1, takes_over=True) if num_new <= available else None
        if source is not None and num_new and num_new <= available - (not source.users):
            return _Plan(found, num_new)
        return _Plan(Found(path), num_new) if num_new <= available else None

    def _cached(self, plan: _Plan) -> int:
        return len(plan.found.path) * self.block + plan.found.num_more

    def _blocks_for(self, plan: _Plan) -> list[int]:
        """The blocks of a request that opens."""
        path, source, _ = plan.found
        prefixes = self._prefixes
        prefixes.use(path)
        blocks = [known.block for known in path]
        if source is not None and plan.takes_over:
            blocks.append(prefixes.forget(source))
        elif source is not None:
            prefixes.use([source])  # it must not be evicted for the request that copies it
        blocks += self._take(plan.num_new, blocks[-1] if blocks else None)
        if source is not None and not plan.takes_over:
            prefixes.leave([source])
        return blocks

    def _take(self, count: int, behind: int | None) -> list[int]:
        while self._free.total < count:
            self._free.give([self._prefixes.evict()])
        return self._free.take(count, behind)

    def _num_blocks_for(self, slots: int) -> int:
        return -(-slots // self.block)

    def _slots(self, blocks: Iterable[int]) -> SlotRuns:
        return tuple((start * self.block, length * self.block) for start, length in runs_of(blocks))
