"""Who has which slots: requests lease them, adopt prefixes, and leave their tokens to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipedec.core.stage_message import SlotRuns
from pipedec.kv.blocks import FreeRuns, runs_of
from pipedec.kv.prefixes import KnownBlock, Prefixes, Snapshots


@dataclass(frozen=True)
class Lease:
    """The memory of a request that opens; the attributes are those of ``NewRequest``."""

    slots: SlotRuns
    cached: int = 0
    copied: tuple[int, int] = (0, 0)
    snapshot: int | None = None
    snapshots: tuple[tuple[int, int], ...] = ()


@dataclass
class _Holder:
    """A running request.

    Attributes:
        blocks: in the order of its slots.
        path: the full known blocks that hold its first tokens.
        rest: its known tokens after those.
        snapshots: the places promised to it, as in its lease. One that is kept for others is not among them.
        is_double: whether another running request has a known block with the first tokens of ``rest``.
    """

    blocks: list[int]
    path: list[KnownBlock]
    rest: list[int]
    snapshots: Sequence[tuple[int, int]] = ()
    is_double: bool = False


@dataclass(frozen=True)
class _Plan:
    """Where the memory of a request comes from.

    Attributes:
        path: the full blocks of the prefix that it adopts.
        source: the block with the rest of that prefix, if there is one.
        cached: tokens of the prefix.
        num_known: full blocks known for its tokens, adopted or not.
        num_new: blocks that the request needs in addition to those of the prefix.
        takes_over: whether the request continues in ``source``, a block that is not full and has no users. Otherwise it copies
            the tokens.
    """

    path: list[KnownBlock]
    source: KnownBlock | None
    cached: int
    num_known: int
    num_new: int
    takes_over: bool = False


class KVManager:
    """The slots of a pipeline's KV pools.

    Args:
        capacity: slots of each stage's pool; rounded down to whole blocks.
        block: slots that are handed out together.
        shares_prefixes: let requests adopt prefixes of other requests, running or ended.
        snapshots: places for states of recurrent layers, without which no prefix is adopted; None if there are no such layers.

    Attributes:
        capacity: slots in all blocks.
        queried_tokens: tokens of all requests opened so far that could have been adopted.
        adopted_tokens: those that were adopted.

    Raises:
        ValueError: there is not even one block.
    """

    def __init__(self, capacity: int, block: int = 16, shares_prefixes: bool = True, snapshots: int | None = None) -> None:
        if block < 1 or capacity < block:
            raise ValueError(f"{capacity} slots are not one block of {block}")
        self.block = block
        self.shares_prefixes = shares_prefixes
        self.snapshots = snapshots
        self.queried_tokens = 0
        self.adopted_tokens = 0
        self.capacity = capacity // block * block
        self.clear()

    def clear(self) -> None:
        """Forget all requests and prefixes: the stages have lost the contents of their pools."""
        self._free = FreeRuns(self.capacity // self.block)
        self._prefixes = Prefixes(self.block, Snapshots(self.snapshots or 0))
        self._holders: dict[int, _Holder] = {}

    @property
    def used_slots(self) -> int:
        """Slots of running requests; shared ones count once."""
        return self.capacity - self.free_slots

    @property
    def kept_slots(self) -> int:
        """Slots that hold prefixes of ended requests, and can be reused."""
        return self._prefixes.num_kept * self.block

    @property
    def free_slots(self) -> int:
        """Slots that no running request has, including those with prefixes."""
        return (self._free.total + self._prefixes.num_kept) * self.block

    def cached_for(self, token_ids: Sequence[int], slots: int) -> int | None:
        """The number of cached tokens that ``open`` would adopt now; None if there is no room."""
        plan = self._plan(token_ids, slots)
        return None if plan is None else plan.cached

    def allocate(self, number: int, token_ids: Sequence[int], slots: int) -> Lease | None:
        """Give a request ``slots`` slots in all, including those of the longest known prefix; None if there is no room now.

        Args:
            token_ids: the tokens that enter first: prompt, and the answer so far. At least the last one is never adopted.

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
        if source is not None and plan.takes_over:
            blocks.append(self._prefixes.forget(source))
        elif source is not None:
            self._prefixes.use([source])  # it must not be evicted for the request that copies it
            copied = (source.block * self.block, plan.cached - num_adopted)
        blocks += self._take(plan.num_new, blocks)
        if source is not None and not plan.takes_over:
            self._prefixes.leave([source])
        snapshot = self._prefixes.snapshots.use(path[-1]) if path else None
        snapshots = self._promise(plan, len(token_ids), snapshot)
        self._holders[number] = _Holder(blocks, path, list(token_ids[num_adopted : plan.cached]), snapshots)
        return Lease(tuple(runs_of(blocks, self.block)), plan.cached, copied, snapshot, snapshots)

    def grow(self, number: int, slots: int) -> SlotRuns | None:
        """Give a request more slots, to at least ``slots`` in all. Returns the new ones; None if there is no room now."""
        blocks = self._holders[number].blocks
        more = -(-slots // self.block) - len(blocks)
        if more <= 0:
            return ()
        if more * self.block > self.free_slots:
            return None
        new = self._take(more, blocks)
        blocks += new
        return tuple(runs_of(new, self.block))

    def slots_of(self, number: int) -> int:
        """Slots that a request has; 0 if it is not open."""
        return len(self._holders[number].blocks) * self.block if number in self._holders else 0

    def tokens_of(self, number: int) -> int:
        """The number of known tokens in the first slots of an open request."""
        holder = self._holders[number]
        return len(holder.path) * self.block + len(holder.rest)

    def extend(self, number: int, token_ids: Sequence[int]) -> None:
        """Note which tokens the next slots of a request hold from the next timestep on, beginning after the ``cached`` tokens
        of its lease. Raises ValueError if the request has too few slots.
        """
        holder = self._holders[number]
        if not self.shares_prefixes:
            return
        before = self.tokens_of(number)
        holder.rest += token_ids
        num_slots = len(holder.blocks) * self.block
        if self.tokens_of(number) > num_slots:
            raise ValueError(f"request {number} has {num_slots} slots, too few for its tokens")
        if not holder.is_double:
            holder.is_double = not self._make_known(holder)
        self._keep_snapshots(holder, before)

    def free(self, number: int) -> None:
        """Close a request that has ended or is paused. Its slots are free, but its tokens may still be adopted."""
        holder = self._holders.pop(number)
        self._make_known(holder, has_ended=True)
        self._keep_snapshots(holder)
        for _, place in holder.snapshots:
            self._prefixes.snapshots.give(place)
        path, blocks = holder.path, holder.blocks
        if holder.rest:
            known = self._prefixes.add(path, tuple(holder.rest), blocks[len(path)])
            self._prefixes.use([known])
            path.append(known)
        own = [block for block, known in zip(blocks, path, strict=False) if block != known.block] + blocks[len(path) :]
        self._prefixes.leave(path)
        self._free.give(own)

    def forget_kept(self) -> None:
        """Forget all prefixes that no running request uses, and all snapshots: their contents may be wrong."""
        self._prefixes.snapshots.drop_all()
        while self._prefixes.num_kept:
            self._free.give([self._prefixes.evict()])

    def _make_known(self, holder: _Holder, has_ended: bool = False) -> bool:
        """Add the full blocks after the holder's path to the known ones. Returns whether all were added: not while a block of
        another running request has the same tokens.
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

    def _promise(self, plan: _Plan, num_tokens: int, adopted: int | None) -> tuple[tuple[int, int], ...]:
        """Places for states that a request is to keep: those after the tokens that another request has had too, and those after
        the last full block, which serve when all its tokens come again. Fewer if there are too few places.
        """
        if self.snapshots is None or not self.shares_prefixes:
            return ()
        promised: list[tuple[int, int]] = []
        for end in sorted({plan.num_known, max(num_tokens - 1, 0) // self.block}):
            if end > len(plan.path) and (place := self._prefixes.snapshots.take(adopted)) is not None:
                promised.append((end * self.block, place))
        return tuple(promised)

    def _keep_snapshots(self, holder: _Holder, before: int = 0) -> None:
        """Keep for others the promised states after more than ``before`` tokens, where these and their blocks are known."""
        first = len(holder.path) * self.block
        left: list[tuple[int, int]] = []
        for tokens, place in holder.snapshots:
            known = None
            if before < tokens <= first + len(holder.rest):
                known = self._prefixes.end_of(holder.path[: tokens // self.block], holder.rest[: max(tokens - first, 0)])
            if known is None:
                left.append((tokens, place))
            else:
                self._prefixes.snapshots.keep(known, place)
        holder.snapshots = left

    def _plan(self, token_ids: Sequence[int], slots: int) -> _Plan | None:
        path, source, num_more = self._prefixes.find(token_ids[:-1]) if self.shares_prefixes else ([], None, 0)
        num_known = len(path)
        if self.snapshots is not None:
            path, source = path[: self._prefixes.snapshots.deepest(path)], None
        num_adopted, num_new = len(path) * self.block, max(-(-slots // self.block) - len(path), 0)
        available = self._free.total + self._prefixes.num_kept - sum(not known.users for known in path)
        if num_new > available:
            return None
        if source is not None and num_new:
            if len(source.tokens) == num_more < self.block:
                return _Plan(path, source, num_adopted + num_more, num_known, num_new - 1, takes_over=True)
            if num_new <= available - (not source.users):
                return _Plan(path, source, num_adopted + num_more, num_known, num_new)
        return _Plan(path, None, num_adopted, num_known, num_new)

    def _take(self, number: int, blocks: Sequence[int]) -> list[int]:
        """Take ``number`` blocks, evicting known ones if needed, and those that follow ``blocks`` if possible."""
        while self._free.total < number:
            self._free.give([self._prefixes.evict()])
        return self._free.allocate(number, blocks[-1] if blocks else None)
