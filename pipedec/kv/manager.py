"""The KV memory of a pipeline as rank 0 keeps its books: slots for requests, and prefixes that requests share.

Every stage has a pool of as many slots, and gets the same slots for a request. So one decision on rank 0 is enough, and stages
neither search nor count. Slots are handed out in blocks. The blocks of a request that has ended keep their tokens until they are
needed, least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipedec.core import SlotRuns
from pipedec.kv.blocks import Found, FreeRuns, KnownBlock, Prefixes, runs_of


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


@dataclass(frozen=True)
class _Plan:
    """How a request would open.

    Attributes:
        path: the full blocks of the prefix that it adopts.
        source: the block with the rest of that prefix, if there is one.
        cached: tokens of the prefix.
        num_new: blocks that the request needs beside those of the prefix.
        takes_over: ``source`` is not full, and nobody else's: the request goes on in it. Otherwise it copies from it.
    """

    path: list[KnownBlock]
    source: KnownBlock | None
    cached: int
    num_new: int
    takes_over: bool = False


class KVManager:
    """The slots of a pipeline's KV pools.

    Args:
        capacity: slots of each stage's pool; rounded down to whole blocks.
        block: slots that are handed out together.
        shares_prefixes: let requests adopt prefixes that other requests, running or ended, hold.

    Attributes:
        capacity: slots in all blocks.
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
        self.capacity = capacity // block * block
        self.clear()

    def clear(self) -> None:
        """The stages have lost what is in their pools: no request is open, and no prefix is known."""
        self._free = FreeRuns(self.capacity // self.block)
        self._prefixes = Prefixes(self.block)
        self._holders: dict[int, _Holder] = {}

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
        return (self._free.total + self._prefixes.num_kept) * self.block

    def cached_for(self, token_ids: Sequence[int], slots: int) -> int | None:
        """How many tokens ``open`` would find cached now; None if there is no room."""
        plan = self._plan(token_ids, slots)
        return None if plan is None else plan.cached

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
        if self.shares_prefixes:
            self.queried_tokens += max(len(token_ids) - 1, 0)
            self.adopted_tokens += plan.cached
        path, source, copied, num_adopted = plan.path, plan.source, (0, 0), len(plan.path) * self.block
        blocks = [known.block for known in path]
        self._prefixes.use(path)
        if source is None:
            blocks += self._take(plan.num_new, blocks)
        elif plan.takes_over:
            blocks.append(self._prefixes.forget(source))
            blocks += self._take(plan.num_new, blocks)
        else:
            self._prefixes.use([source])  # it must not be evicted for the request that copies it
            blocks += self._take(plan.num_new, blocks)
            self._prefixes.leave([source])
            copied = (source.block * self.block, plan.cached - num_adopted)
        self._holders[number] = _Holder(blocks, path, list(token_ids[num_adopted : plan.cached]))
        return Lease(self._slots(blocks), plan.cached, copied)

    def grow(self, number: int, slots: int) -> SlotRuns | None:
        """Give a request further slots, so that it has at least ``slots``; empty if it has, None if there is no room now."""
        blocks = self._holders[number].blocks
        more = -(-slots // self.block) - len(blocks)
        if more <= 0:
            return ()
        if more * self.block > self.free_slots:
            return None
        new = self._take(more, blocks)
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
        path, blocks = holder.path, holder.blocks
        if holder.rest:
            known = self._prefixes.add(path, tuple(holder.rest), blocks[len(path)])
            self._prefixes.use([known])
            path.append(known)
        own = [block for block, known in zip(blocks, path, strict=False) if block != known.block] + blocks[len(path) :]
        self._prefixes.leave(path)
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
        path, source, num_more = self._prefixes.find(token_ids[:-1]) if self.shares_prefixes else Found([])
        num_adopted, num_new = len(path) * self.block, max(-(-slots // self.block) - len(path), 0)
        available = self._free.total + self._prefixes.num_kept - sum(not known.users for known in path)
        if source is not None and num_new:
            if len(source.tokens) == num_more < self.block:
                plan = _Plan(path, source, num_adopted + num_more, num_new - 1, takes_over=True)
                return plan if num_new <= available else None
            if num_new <= available - (not source.users):
                return _Plan(path, source, num_adopted + num_more, num_new)
        return _Plan(path, None, num_adopted, num_new) if num_new <= available else None

    def _take(self, number: int, blocks: Sequence[int]) -> list[int]:
        """Take so many blocks, those behind ``blocks`` if possible."""
        while self._free.total < number:
            self._free.give([self._prefixes.evict()])
        return self._free.take(number, blocks[-1] if blocks else None)

    def _slots(self, blocks: Iterable[int]) -> SlotRuns:
        return tuple((start * self.block, length * self.block) for start, length in runs_of(blocks))
