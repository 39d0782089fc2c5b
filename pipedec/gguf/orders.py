"""Blocks of rows or columns that llama.cpp's converter puts in another order than a checkpoint's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class BlockOrder:
    """The order of blocks of rows, or of columns, which is the same in every ``len(places)`` blocks.

    Attributes:
        size: rows or columns of a block.
        places: for each block in the checkpoint, its place in the file.
    """

    size: int
    places: tuple[int, ...]

    def indices(self, count: int) -> npt.NDArray[np.int64]:
        """For each of ``count`` rows or columns in the checkpoint, its place in the file."""
        import numpy as np

        blocks = np.arange(count).reshape(-1, len(self.places), self.size)
        return blocks[:, list(self.places)].reshape(-1)


def interleaved(head_dim: int) -> BlockOrder:
    """The two halves of each head, which alternate row by row in the file."""
    return BlockOrder(1, (*range(0, head_dim, 2), *range(1, head_dim, 2)))


def by_part(heads: int, sizes: Sequence[int], first: int = 0) -> BlockOrder:
    """Parts of heads, which the file has part by part, of all heads, and the checkpoint head by head.

    Args:
        sizes: rows of each part of a head.
        first: rows before the heads, which stay in their places.
    """
    size = math.gcd(first, *sizes)
    counts = [part // size for part in sizes]
    starts = list(accumulate((heads * count for count in counts), initial=first // size))
    moved = (
        start + head * count + block
        for head in range(heads)
        for start, count in zip(starts, counts, strict=False)
        for block in range(count)
    )
    return BlockOrder(size, (*range(first // size), *moved))
