"""The KV pool of one stage: the keys and values of all requests in one tensor, handed out in blocks of slots.

Owns which blocks belong to which cache. Knows neither the levels of a cache nor tokens nor requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import UserError
from pipedec.model.cache import KVCache


class KVPool:
    """Keys and values of every layer of a stage for many requests, in one tensor [L, 2, K, slots, D].

    A cache has consecutive blocks, the first free ones that suffice, so that views of it need no copy. If the block behind its
    last one is taken, a growing cache is moved with one copy.

    Args:
        block: slots per block.
        prompt: [L, 2, K, Q, D], keys and values of a learned prompt, for caches that are opened with it; or None.
        capacity: slots of the tensor, which then never moves in memory; None to double it whenever it is full.

    Attributes:
        tensor: [L, 2, K, slots, D]. It is replaced when the pool grows.

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
        capacity: int | None = None,
    ) -> None:
        if block < 1:
            raise ValueError(f"block must be at least 1, not {block}")
        self.block = block
        self.prompt = prompt
        self._is_fixed = capacity is not None
        self._caches: dict[KVCache, range] = {}  # the blocks of each, in order of their numbers
        self.tensor = torch.empty((num_layers, 2, num_kv_heads, 0, head_dim), dtype=dtype, device=device)
        self._allocate(self._blocks_for(block if capacity is None else capacity))

    @property
    def slots(self) -> int:
        """Number of slots in all blocks."""
        return self.tensor.shape[3]

    @property
    def used_slots(self) -> int:
        """Number of slots in the blocks of open caches."""
        return sum(map(len, self._caches.values())) * self.block

    @property
    def num_caches(self) -> int:
        return len(self._caches)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.tensor.nbytes

    def open(self, with_prompt: bool = False, reserve: int = 1) -> KVCache:
        """An empty cache. ``close`` returns its blocks to the pool.

        Args:
            with_prompt: the learned prompt lies in front of its slots.
            reserve: slots that it has from the beginning, rounded up to whole blocks.

        Raises:
            UserError: the pool has a capacity and is full.
        """
        cache = KVCache(self, self.prompt if with_prompt else None)
        self._caches[cache] = range(0)
        try:
            self.resize(cache, reserve)
        except UserError:
            self.close(cache)
            raise
        cache.write_prompt()
        return cache

    def close(self, cache: KVCache) -> None:
        """Free the blocks of ``cache``, which must not be used any more."""
        del self._caches[cache]

    def resize(self, cache: KVCache, slots: int) -> None:
        """Give ``cache`` at least ``slots`` slots, and keep its contents.

        Raises:
            UserError: the pool has a capacity and is full.
        """
        own = self._caches[cache]
        count = max(self._blocks_for(cache.prompt_length) + self._blocks_for(slots), len(own))
        if len(own) == count:
            return
        if own and self._is_free(own.stop, own.start + count):
            self._give(cache, range(own.start, own.start + count))
        elif (first := self._first_fit(count)) is not None:
            self._move(cache, range(first, first + count), self._contents(cache))
        elif self._is_fixed:
            self._compact(cache, count)
        else:
            self._allocate(self._num_blocks + max(self._num_blocks, count))
            self.resize(cache, slots)

    def _compact(self, growing: KVCache, count: int) -> None:
        """Move all caches to the front, and behind them ``growing``, to which ``count`` blocks are given."""
        others = {cache: len(blocks) for cache, blocks in self._caches.items() if cache is not growing}
        first = 0
        if sum(others.values()) + count > self._num_blocks:
            raise UserError(
                f"the KV cache is full: {self.used_slots} of its {self.slots} slots are used, and a request needs "
                f"{count * self.block}; run fewer or shorter requests at a time, or give the cache a larger capacity"
            )
        contents = self._contents(growing).clone()
        self._caches[growing] = range(0)
        for cache, num_blocks in others.items():
            self._move(cache, range(first, first + num_blocks), self._contents(cache).clone())
            first += num_blocks
        self._move(growing, range(first, first + count), contents)

    def write(self, layer: int, slots: slice | Tensor, keys_RKD: Tensor, values_RKD: Tensor) -> None:
        """Write rows of any caches to one layer.

        Args:
            slots: where; a slice, or int64 [R].
        """
        for part, rows_RKD in enumerate((keys_RKD, values_RKD)):
            if isinstance(slots, slice):
                self.tensor[layer, part, :, slots] = rows_RKD.transpose(0, 1)
            else:
                self.tensor[layer, part].index_copy_(1, slots, rows_RKD.transpose(0, 1))

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer block by block, each [blocks, block, K, D], without copying."""
        _, _, heads, _, head_dim = self.tensor.shape
        of_blocks = self.tensor[layer].view(2, heads, self._num_blocks, self.block, head_dim)
        keys, values = of_blocks.permute(0, 2, 3, 1, 4).unbind(0)
        return keys, values

    @property
    def _num_blocks(self) -> int:
        return self.slots // self.block

    def _blocks_for(self, slots: int) -> int:
        return -(-slots // self.block)

    def _is_free(self, start: int, stop: int) -> bool:
        """Whether the blocks from ``start`` to before ``stop`` exist and are free."""
        if stop * self.block > self.slots:
            return False
        return all(blocks.stop <= start or blocks.start >= stop for blocks in self._caches.values() if blocks)

    def _first_fit(self, count: int) -> int | None:
        """The first of the first ``count`` consecutive free blocks; None if there are none."""
        starts = [0, *(blocks.stop for blocks in self._caches.values())]
        return next((start for start in sorted(starts) if self._is_free(start, start + count)), None)

    def _give(self, cache: KVCache, blocks: range) -> None:
        self._caches[cache] = blocks
        self._caches = dict(sorted(self._caches.items(), key=lambda item: item[1].start))
        cache.start = (blocks.start + self._blocks_for(cache.prompt_length)) * self.block
        cache.slots = blocks.stop * self.block - cache.start

    def _contents(self, cache: KVCache) -> Tensor:
        """Its learned prompt and its rows, [L, 2, K, Q + rows, D]; of a cache without blocks nothing."""
        if not self._caches[cache]:
            return self.tensor[:, :, :, :0]
        return self.tensor[:, :, :, cache.start - cache.prompt_length : cache.start + cache.length]

    def _move(self, cache: KVCache, blocks: range, contents: Tensor) -> None:
        """Give a cache other blocks, and copy what it held before to them."""
        self._give(cache, blocks)
        first = cache.start - cache.prompt_length
        self.tensor[:, :, :, first : first + contents.shape[3]] = contents

    @torch.inference_mode(False)  # a tensor made in inference mode could only be written there
    def _allocate(self, num_blocks: int) -> None:
        layers, two, heads, _, head_dim = self.tensor.shape
        larger = self.tensor.new_empty((layers, two, heads, num_blocks * self.block, head_dim))
        for cache in self._caches:
            first, contents = cache.start - cache.prompt_length, self._contents(cache)
            larger[:, :, :, first : first + contents.shape[3]] = contents
        self.tensor = larger
