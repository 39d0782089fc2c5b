"""Reading a KV cache as attention does."""

from __future__ import annotations

from torch import Tensor

from pipedec.model import KVCache


def read_cache(cache: KVCache, layer: int, extra_rows: int = 0, with_prompt: bool = False) -> tuple[Tensor, Tensor]:
    """keys_KSD, values_KSD of past and tree in one layer.

    Args:
        extra_rows: also include this number of rows just written after them.
        with_prompt: put the learned prompt first.
    """
    rows = cache.ranges(0, cache.length + extra_rows)
    return cache.pool.reader([cache.prompt, *rows] if with_prompt and cache.prompt else rows)(layer)
