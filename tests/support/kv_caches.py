"""Reading a KV cache as attention does, and a tree over one."""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.model import KVCache, LaneRows
from pipedec.tree import Visibility


def read_cache(cache: KVCache, layer: int, extra_rows: int = 0, with_prompt: bool = False) -> tuple[Tensor, Tensor]:
    """keys_KSD, values_KSD of past and tree in one layer.

    Args:
        extra_rows: also include this number of rows just written after them.
        with_prompt: put the learned prompt first.
    """
    rows = cache.ranges(0, cache.length + extra_rows)
    return cache.pool.reader([cache.prompt, *rows] if with_prompt and cache.prompt else rows)(layer)


def tree(cache: KVCache, rows: int) -> LaneRows:
    """A root with ``rows`` - 1 children after the past."""
    seen = torch.eye(rows, dtype=torch.bool)
    seen[:, 0] = True
    positions = torch.full((rows,), cache.past_length + 1)
    positions[0] -= 1
    return LaneRows(positions, cache, Visibility(seen, cache.past_length, lambda: positions))
