"""The two-level KV cache of one stage: accepted rows (``past``), then speculative rows (``tree``), in one buffer.

In front of both may be a learned prompt (BiTA), which never changes and which only views ``with_prompt`` include.

Knows slots and the order of rows, but not tokens, parents or masks.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer of a stage, in one tensor [L, 2, K, slots, D].

    Slots [0, past_length) hold the accepted rows in the order in which they were committed, the next ``tree_length`` slots the
    speculative rows in the order of entry. Committing the root therefore only moves the boundary, and attention sees both levels
    as one block. A step's rows are written behind both; ``extend_tree`` or ``extend_past`` then adds them to a level.

    Slot 0 is the first one behind the learned prompt.

    Args:
        block: number of slots by which the buffer grows.
        prompt: [L, 2, K, Q, D], keys and values of the learned prompt, or None.

    Raises:
        ValueError: ``block`` is less than 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block: int = 256,
        prompt: Tensor | None = None,
    ) -> None:
        if block < 1:
            raise ValueError(f"block must be at least 1, not {block}")
        self.block = block
        self.past_length = 0
        self.tree_length = 0
        self.prompt_length = 0 if prompt is None else prompt.shape[3]
        shape = (num_layers, 2, num_kv_heads, self.prompt_length + block, head_dim)
        self._buffer = torch.empty(shape, dtype=dtype, device=device)
        if prompt is not None:
            self._buffer[:, :, :, : self.prompt_length] = prompt

    @property
    def length(self) -> int:
        """Number of rows in both levels."""
        return self.past_length + self.tree_length

    @property
    def slots(self) -> int:
        """Number of rows that the buffer can hold."""
        return self._buffer.shape[3] - self.prompt_length

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._buffer.nbytes

    def reset(self) -> None:
        """Drop all rows; the buffer stays allocated."""
        self.past_length = 0
        self.tree_length = 0

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more rows, growing the buffer by whole blocks if necessary."""
        if self.length + rows > self.slots:
            self._grow(self.length + rows)

    @torch.inference_mode(False)  # a buffer made in inference mode could only be written there
    def _grow(self, needed: int) -> None:
        layers, two, heads, _, head_dim = self._buffer.shape
        slots = -(-needed // self.block) * self.block
        grown = self._buffer.new_empty((layers, two, heads, self.prompt_length + slots, head_dim))
        used = self.prompt_length + self.length
        grown[:, :, :, :used] = self._buffer[:, :, :, :used]
        self._buffer = grown

    def write(self, layer: int, keys_KRD: Tensor, values_KRD: Tensor) -> None:
        """Write a step's rows behind the rows of one layer, without adding them to a level.

        Raises:
            ValueError: the buffer is too small; call ``reserve`` first.
        """
        end = self.length + keys_KRD.shape[1]
        if end > self.slots:
            raise ValueError(f"{end} rows do not fit into {self.slots} slots: call reserve before write")
        where = slice(self.prompt_length + self.length, self.prompt_length + end)
        self._buffer[layer, 0, :, where] = keys_KRD
        self._buffer[layer, 1, :, where] = values_KRD

    def view(self, layer: int, extra_rows: int = 0, with_prompt: bool = False) -> tuple[Tensor, Tensor]:
        """keys_KSD, values_KSD of past and tree, without copying.

        Args:
            extra_rows: also include this number of rows just written behind them.
            with_prompt: put the learned prompt first.

        Raises:
            ValueError: the buffer has fewer slots than that.
        """
        end = self.length + extra_rows
        if end > self.slots:
            raise ValueError(f"{end} rows were never written: the buffer has {self.slots} slots")
        first = 0 if with_prompt else self.prompt_length
        keys_KSD, values_KSD = self._buffer[layer, :, :, first : self.prompt_length + end].unbind(0)
        return keys_KSD, values_KSD

    def extend_tree(self, rows: int) -> None:
        """Add ``rows`` written rows to the tree level. Raises ValueError if the buffer is too small to hold them."""
        self._check_written(rows)
        self.tree_length += rows

    def extend_past(self, rows: int) -> None:
        """Add ``rows`` written rows to the past level.

        Raises:
            ValueError: the tree is not empty, so the rows do not follow the past, or the buffer is too small to hold them.
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
        rows = torch.cat((committed, kept))
        order = rows.tolist()
        if len(set(order)) != len(order) or (order and not 0 <= min(order) <= max(order) < self.tree_length):
            raise ValueError(f"advance needs distinct indices below {self.tree_length}, not {order}")
        moved = next((slot for slot, row in enumerate(order) if slot != row), len(order))
        if moved < len(order):
            first = self.prompt_length + self.past_length
            start, end = first + moved, first + len(order)
            sources = rows[moved:].to(self._buffer.device) + first
            self._buffer.narrow(3, start, end - start).copy_(self._buffer.index_select(3, sources))
        self.past_length += len(committed)
        self.tree_length = len(kept)

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
        sources = torch.cat((kept, tree)) + self.prompt_length
        self._buffer[:, :, :, self.prompt_length : self.prompt_length + len(sources)] = self._buffer.index_select(3, sources)
        self.past_length = len(kept)

    def _check_written(self, rows: int) -> None:
        if rows < 0 or self.length + rows > self.slots:
            raise ValueError(f"{rows} rows cannot have been written: {self.length} of {self.slots} slots are used")
