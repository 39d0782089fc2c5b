"""The two-level KV cache of one request: accepted rows (``past``), then speculative rows (``tree``), in slots of a pool.

In front of both may be a learned prompt (BiTA), which never changes and which only views ``with_prompt`` include.

Knows slots and the order of rows, but not tokens, parents or masks, nor which blocks of the pool are whose.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Pool(Protocol):
    """What a cache needs of its pool (see ``KVPool``)."""

    tensor: Tensor
    prompt: Tensor | None
    block: int

    def resize(self, cache: KVCache, slots: int) -> None: ...
    def close(self, cache: KVCache) -> None: ...
    def write(self, layer: int, slots: slice | Tensor, keys_RKD: Tensor, values_RKD: Tensor) -> None: ...
    def pages(self, layer: int) -> tuple[Tensor, Tensor]: ...


class KVCache:
    """Keys and values of one request in every layer of a stage, in consecutive slots of a pool.

    Slots [0, past_length) hold the accepted rows in the order in which they were committed, the next ``tree_length`` slots the
    speculative rows in the order of entry. Committing the root therefore only moves the boundary, and attention sees both levels
    as one block. A step's rows are written behind both; ``extend_tree`` or ``extend_past`` then adds them to a level.

    Slot 0 is the first one behind the learned prompt. Caches are made by ``KVPool.open``.

    Attributes:
        pool: whose slots it has.
        start: the slot of the pool that is its slot 0. The pool changes it when it moves the cache.
        slots: number of rows that it can hold.
        prompt_length: Q, tokens of the learned prompt in front of slot 0.
    """

    def __init__(self, pool: Pool, prompt: Tensor | None) -> None:
        self.pool = pool
        self.start = 0
        self.slots = 0
        self.past_length = 0
        self.tree_length = 0
        self.prompt_length = 0 if prompt is None else prompt.shape[3]

    @property
    def length(self) -> int:
        """Number of rows in both levels."""
        return self.past_length + self.tree_length

    def close(self) -> None:
        """Return the slots to the pool."""
        self.pool.close(self)

    def reset(self) -> None:
        """Drop all rows; the slots stay."""
        self.past_length = 0
        self.tree_length = 0

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more rows.

        Raises:
            UserError: the pool is full.
        """
        if self.length + rows > self.slots:
            self.pool.resize(self, self.length + rows)

    def write_prompt(self) -> None:
        """Copy the learned prompt, if any, in front of slot 0."""
        if self.prompt_length:
            assert self.pool.prompt is not None
            self.pool.tensor[:, :, :, self.start - self.prompt_length : self.start] = self.pool.prompt

    def slots_behind(self, rows: int) -> range:
        """The pool's slots for ``rows`` new rows behind those present. What is written there is in no level yet.

        Raises:
            ValueError: there are too few slots; call ``reserve`` first.
        """
        end = self.length + rows
        if end > self.slots:
            raise ValueError(f"{end} rows do not fit into {self.slots} slots: call reserve before write")
        return range(self.start + self.length, self.start + end)

    def view(self, layer: int, extra_rows: int = 0, with_prompt: bool = False) -> tuple[Tensor, Tensor]:
        """keys_KSD, values_KSD of past and tree, without copying (see ``views``)."""
        keys_KSD, values_KSD = self.views(extra_rows, with_prompt)[2 * layer : 2 * layer + 2]
        return keys_KSD, values_KSD

    def views(self, extra_rows: int = 0, with_prompt: bool = False) -> tuple[Tensor, ...]:
        """keys_KSD and values_KSD of past and tree of every layer, in turns, without copying.

        Args:
            extra_rows: also include this number of rows just written behind them.
            with_prompt: put the learned prompt first.

        Raises:
            ValueError: there are fewer slots than that.
        """
        end = self.length + extra_rows
        if end > self.slots:
            raise ValueError(f"{end} rows were never written: the cache has {self.slots} slots")
        first = self.start - (self.prompt_length if with_prompt else 0)
        return self.pool.tensor[:, :, :, first : self.start + end].flatten(0, 1).unbind(0)

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
            committed: int64 indices into the tree rows, in the order in which they join the past.
            kept: int64 indices into the tree rows, in their new order.

        Raises:
            ValueError: an index is outside the tree or occurs twice.
        """
        order = committed.tolist() + kept.tolist()
        if len(set(order)) != len(order) or (order and not 0 <= min(order) <= max(order) < self.tree_length):
            raise ValueError(f"advance needs distinct indices below {self.tree_length}, not {order}")
        moved = next((slot for slot, row in enumerate(order) if slot != row), len(order))
        if moved < len(order):
            self._gather(self.past_length + moved, torch.cat((committed, kept))[moved:] + self.past_length)
        self.past_length += committed.shape[0]
        self.tree_length = kept.shape[0]

    def release(self, kept: Tensor) -> None:
        """Drop all past rows except ``kept``; the tree follows directly behind them.

        Args:
            kept: int64 slots of the past, ascending.

        Raises:
            ValueError: a slot is outside the past or out of order.
        """
        if len(kept) and (bool((kept.diff() <= 0).any()) or int(kept[0]) < 0 or int(kept[-1]) >= self.past_length):
            raise ValueError(f"slots to keep must be ascending and below {self.past_length}")
        tree = torch.arange(self.past_length, self.length, device=kept.device)
        self._gather(0, torch.cat((kept, tree)))
        self.past_length = len(kept)

    def _gather(self, first: int, sources: Tensor) -> None:
        """Copy the rows of the slots ``sources`` to the slots from ``first`` on."""
        tensor = self.pool.tensor
        rows = tensor.index_select(3, sources.to(tensor.device) + self.start)
        tensor.narrow(3, self.start + first, len(sources)).copy_(rows)

    def _check_written(self, rows: int) -> None:
        if rows < 0 or self.length + rows > self.slots:
            raise ValueError(f"{rows} rows cannot have been written: {self.length} of {self.slots} slots are used")
