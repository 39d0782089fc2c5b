"""The two-level KV cache of one request: accepted rows (``past``), then speculative rows (``tree``), in slots of a pool.

In front of both may be a learned prompt (BiTA), which never changes and which only readers ``with_prompt`` see.

Knows slots and the order of rows, but not tokens, parents or masks, nor who else has the same slots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import SlotRuns

Reader = Callable[[int], tuple[Tensor, Tensor]]  # by layer: keys_KSD, values_KSD


class Pool(Protocol):
    """What a cache needs of its pool (see ``KVPool``)."""

    tensor: Tensor
    block: int
    slots: int
    spare_slot: int

    def write(self, layer: int, slots: slice | Tensor, keys_RKD: Tensor, values_RKD: Tensor) -> None: ...
    def copy(self, sources: Sequence[int], targets: Sequence[range]) -> None: ...
    def pages(self, layer: int) -> tuple[Tensor, Tensor]: ...


class KVCache:
    """Keys and values of one request in every layer of a stage, in the slots of a pool that it was given.

    Slots [0, past_length) hold the accepted rows in the order in which they were committed, the next ``tree_length`` slots the
    speculative rows in the order of entry. Committing the root therefore only moves the boundary, and attention sees both levels
    as one block. A step's rows are written behind both; ``extend_tree`` or ``extend_past`` then adds them to a level.

    Its slots are *runs* of consecutive slots of the pool. One run is read without copying, several are joined layer by layer.
    The first slots may be shared with other requests: nothing is ever written before ``past_length``, but for ``release``.

    Args:
        prompt: the pool's slots of the learned prompt that lies in front of slot 0; empty without one.

    Attributes:
        pool: whose slots it has.
        slots: number of rows that it can hold.
    """

    def __init__(self, pool: Pool, prompt: range) -> None:
        self.pool = pool
        self.slots = 0
        self.past_length = 0
        self.tree_length = 0
        self._prompt = prompt
        self._runs: list[range] = []  # slots of the pool; no two that follow each other there
        self._firsts: list[int] = []  # of each run, the first of the cache's slots

    @property
    def length(self) -> int:
        """Number of rows in both levels."""
        return self.past_length + self.tree_length

    @property
    def prompt_length(self) -> int:
        """Q, tokens of the learned prompt in front of slot 0."""
        return len(self._prompt)

    def extend(self, runs: SlotRuns) -> None:
        """Add slots of the pool behind the present ones.

        Raises:
            ValueError: a run is not in the pool, or is not one of whole blocks.
        """
        for first, count in runs:
            if first % self.pool.block or count % self.pool.block or not 0 <= first < first + count <= self.pool.slots:
                raise ValueError(
                    f"{count} slots from {first} on are not whole blocks of {self.pool.block} in a pool of {self.pool.slots}"
                )
            if self._runs and self._runs[-1].stop == first:
                self._runs[-1] = range(self._runs[-1].start, first + count)
            else:
                self._runs.append(range(first, first + count))
                self._firsts.append(self.slots)
            self.slots += count

    def adopt(self, cached: int, copied: tuple[int, int] = (0, 0)) -> None:
        """Take over the rows of others as the past of an empty cache.

        Args:
            cached: how many of the first slots hold them.
            copied: slots of the pool, (first, how many), from which the last of these are copied before.

        Raises:
            ValueError: there are too few slots, or these are not in the pool.
        """
        first, count = copied
        if not 0 <= count <= cached <= self.slots or not 0 <= first <= first + count <= self.pool.slots:
            raise ValueError(f"{cached} rows, {count} of them from {first} on, do not fit into {self.slots} slots")
        if count:
            self.pool.copy(range(first, first + count), self.ranges(cached - count, cached))
        self.past_length = cached

    def reset(self) -> None:
        """Drop all rows; the slots stay."""
        self.past_length = 0
        self.tree_length = 0

    def ranges(self, first: int, stop: int) -> list[range]:
        """The pool's slots of the slots from ``first`` to before ``stop``, run by run; at least one range."""
        if len(self._runs) == 1:
            start = self._runs[0].start
            return [range(start + first, start + stop)]
        found = list[range]()
        for index in range(max(bisect_right(self._firsts, first) - 1, 0), len(self._runs)):
            offset = self._firsts[index]
            if offset >= stop:
                break
            found.append(self._runs[index][max(first - offset, 0) : stop - offset])
        return found or [range(0)]

    def blocks(self, slots: int) -> list[int]:
        """The pool's blocks, in order, in which the first ``slots`` slots are."""
        block = self.pool.block
        return [first // block for run in self.ranges(0, slots) for first in range(run.start, run.stop, block)]

    def slots_behind(self, rows: int) -> list[range]:
        """The pool's slots for ``rows`` new rows behind those present. What is written there is in no level yet.

        Raises:
            ValueError: there are too few slots.
        """
        end = self.length + rows
        if end > self.slots:
            raise ValueError(f"{end} rows do not fit into the {self.slots} slots that this request was given")
        return self.ranges(self.length, end)

    def view(self, layer: int, extra_rows: int = 0, with_prompt: bool = False) -> tuple[Tensor, Tensor]:
        """keys_KSD, values_KSD of past and tree in one layer (see ``reader``)."""
        return self.reader(extra_rows, with_prompt)(layer)

    def reader(self, extra_rows: int = 0, with_prompt: bool = False) -> Reader:
        """Reads keys_KSD and values_KSD of past and tree, a layer at a time, when they have been written there.

        Args:
            extra_rows: also include this number of rows just written behind them.
            with_prompt: put the learned prompt first.

        Raises:
            ValueError: there are fewer slots than that.
        """
        ranges = self.read_ranges(extra_rows, with_prompt)
        parts = [self.pool.tensor[:, :, :, part.start : part.stop] for part in ranges]
        return _reader_of_one(parts[0]) if len(parts) == 1 else _reader_of_several(parts)

    def read_ranges(self, extra_rows: int = 0, with_prompt: bool = False) -> list[range]:
        """The pool's slots that a reader with these arguments reads, run by run. Raises ValueError if there are fewer slots."""
        end = self.length + extra_rows
        if end > self.slots:
            raise ValueError(f"{end} rows were never written: the cache has {self.slots} slots")
        return [*([self._prompt] if with_prompt and self._prompt else []), *self.ranges(0, end)]

    def extend_tree(self, rows: int) -> None:
        """Add ``rows`` written rows to the tree level. Raises ValueError if there are too few slots to hold them."""
        self._check_written(rows)
        self.tree_length += rows

    def extend_past(self, rows: int) -> None:
        """Add ``rows`` written rows to the past level.

        Raises:
            ValueError: the tree is not empty, so the rows do not follow the past, or there are too few slots to hold them.
        """
        if self.tree_length:
            raise ValueError(f"cannot extend the past behind {self.tree_length} tree rows: advance or reset first")
        self._check_written(rows)
        self.past_length += rows

    def advance(self, committed: Tensor, kept: Tensor) -> None:
        """Commit tree rows to the past and prune those that are not kept (one copy over all layers).

        Args:
            committed: int64 indices into the tree rows, in the order in which they join the past; on the host.
            kept: int64 indices into the tree rows, in their new order; on the host.

        Raises:
            ValueError: an index is outside the tree or occurs twice.
        """
        order = committed.tolist() + kept.tolist()
        if len(set(order)) != len(order) or (order and not 0 <= min(order) <= max(order) < self.tree_length):
            raise ValueError(f"advance needs distinct indices below {self.tree_length}, not {order}")
        moved = next((slot for slot, row in enumerate(order) if slot != row), len(order))
        self._gather(self.past_length + moved, [self.past_length + row for row in order[moved:]])
        self.past_length += committed.shape[0]
        self.tree_length = kept.shape[0]

    def release(self, kept: Tensor) -> None:
        """Drop all past rows except ``kept``; the tree follows directly behind them.

        Args:
            kept: int64 slots of the past, ascending; on the host.

        Raises:
            ValueError: a slot is outside the past or out of order.
        """
        if len(kept) and (bool((kept.diff() <= 0).any()) or int(kept[0]) < 0 or int(kept[-1]) >= self.past_length):
            raise ValueError(f"slots to keep must be ascending and below {self.past_length}")
        sources = [*kept.tolist(), *range(self.past_length, self.length)]
        moved = next((slot for slot, source in enumerate(sources) if slot != source), len(sources))
        self._gather(moved, sources[moved:])
        self.past_length = len(kept)

    def _gather(self, first: int, sources: list[int]) -> None:
        """Copy the rows of the slots ``sources`` to the slots from ``first`` on."""
        if sources:
            own = [self._slot(source) for source in sources]
            self.pool.copy(own, self.ranges(first, first + len(sources)))

    def _slot(self, slot: int) -> int:
        """The pool's slot of one of the cache's."""
        run = bisect_right(self._firsts, slot) - 1
        return self._runs[run].start + slot - self._firsts[run]

    def _check_written(self, rows: int) -> None:
        if rows < 0 or self.length + rows > self.slots:
            raise ValueError(f"{rows} rows cannot have been written: {self.length} of {self.slots} slots are used")


def _reader_of_one(part: Tensor) -> Reader:
    """Of consecutive slots [L, 2, K, S, D], without copying."""
    views = part.flatten(0, 1).unbind(0)
    return lambda layer: (views[2 * layer], views[2 * layer + 1])


def _reader_of_several(parts: list[Tensor]) -> Reader:
    """Of several runs, each [L, 2, K, slots, D], which are joined one layer at a time."""
    by_layer = list(zip(*(part.unbind(0) for part in parts), strict=True))

    def read(layer: int) -> tuple[Tensor, Tensor]:
        keys_KSD, values_KSD = torch.cat(by_layer[layer], 2).unbind(0)
        return keys_KSD, values_KSD

    return read
