"""Rows of several requests, and the cache slots that they attend to, padded to rectangles so that one call attends for all.

Knows indices only, neither masks nor whose rows they are. Shapes as in ``attention``, and: B requests, M and N the most rows and
slots of any of them, T rows that take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.device import to_device


@dataclass(frozen=True)
class Rectangles:
    """Where each request's rows and slots are.

    Attributes:
        rows: int64 [B, M], indices into the forward's rows; filled up with a request's first row.
        slots: int64 [B, N], slots of the pool; filled up with a request's first one.
        order: int64 [T], the rows without padding, as indices into [B · M].
    """

    rows: Tensor
    slots: Tensor
    order: Tensor

    @classmethod
    def empty(cls, requests: int, most_rows: int, most_slots: int, rows: int) -> Rectangles:
        """B, M, N and T; all indices are 0, on the host."""
        sizes = (requests, most_rows), (requests, most_slots), (rows,)
        return cls(*(torch.zeros(size, dtype=torch.int64) for size in sizes))

    @classmethod
    def of(cls, rows: Sequence[range], slots: Sequence[Sequence[range]], device: torch.device) -> Rectangles:
        """Rectangles that are as small as possible.

        Args:
            rows: for each request, its range of the forward's rows.
            slots: for each request, runs of slots of the pool.
        """
        most_rows, most_slots = max(map(len, rows)), max(sum(map(len, runs)) for runs in slots)
        found = cls.empty(len(rows), most_rows, most_slots, sum(map(len, rows)))
        found.fill(rows, slots)
        return cls(*(to_device(indices, device) for indices in (found.rows, found.slots, found.order)))

    def fill(self, rows: Sequence[range], slots: Sequence[Sequence[range]]) -> None:
        """Enter the requests' rows and slots (see ``of``) into rectangles on the host. The other entries keep their values."""
        first = 0
        for index, (own, runs) in enumerate(zip(rows, slots, strict=True)):
            _fill(self.rows[index], [own])
            _fill(self.slots[index], runs)
            start = index * self.rows.shape[1]
            torch.arange(start, start + len(own), out=self.order[first : first + len(own)])
            first += len(own)

    def folded(self, q_RHD: Tensor, kv_heads: int) -> Tensor:
        """The queries of all requests, [B, K, M·G, D]: the heads that share a key-value head are rows."""
        (requests, most_rows), head_dim = self.rows.shape, q_RHD.shape[2]
        return q_RHD[self.rows].view(requests, most_rows, kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)

    def keys_values(self, cached: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all requests, each [B, K, N, D].

        Args:
            cached: [2, K, slots of the pool, D], those of a layer.
        """
        _, kv_heads, _, head_dim = cached.shape
        gathered = cached.index_select(2, self.slots.flatten()).view(2, kv_heads, len(self.slots), -1, head_dim)
        keys, values = gathered.transpose(1, 2).unbind(0)
        return keys, values

    def unfolded(self, folded: Tensor, heads: int) -> Tensor:
        """[B, K, M·G, X], in the order of ``folded``, to [T, H, X]."""
        requests, kv_heads, _, size = folded.shape
        rows = folded.view(requests, kv_heads, self.rows.shape[1], -1, size).transpose(1, 2)
        return rows.reshape(-1, heads, size)[self.order]


def _fill(target: Tensor, ranges: Iterable[range]) -> None:
    """Write the numbers of ``ranges`` one after the other, then repeat the first one."""
    first = 0
    for numbers in ranges:
        torch.arange(numbers.start, numbers.stop, out=target[first : first + len(numbers)])
        first += len(numbers)
    target[first:] = target[0]
