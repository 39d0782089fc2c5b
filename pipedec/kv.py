"""The KV memory of a pipeline as rank 0 manages it: slots for requests, and prefixes that requests share.

All stages have pools of the same size, and use the same slots for a request. So rank 0 alone decides, and stages neither search
nor count. Slots are handed out in blocks. Free blocks are stored as runs of consecutive ones: blocks may be many, but runs are
few.

Blocks with known tokens form a tree, in which a block is the child of the block with the tokens before its own: the path from the
root to a block is a prefix of some request. Running requests use whole paths. The blocks of a request that has ended keep their
tokens until the memory is needed. Then the least recently used block goes first, but none before its children. Only requests that
have ended leave blocks that are not full; these have no children.

Keys and values of a prefix can be adopted up to any token. Recurrent layers have states instead, each of one position. So with
such layers a prefix can be adopted only up to the end of a known block after which a *snapshot* of the states is kept. All stages
use the same places for snapshots too.

Plain Python; knows no tensor, no stage and no method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice, takewhile

from pipedec.core.stage_message import SlotRuns

_MOST_COMPARED = 64  # latest blocks that are compared with the beginning of a prompt


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
