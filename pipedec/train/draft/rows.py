"""Continuations packed into rows of equal length, for a draft to learn from."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.train.continuations import Continuation


@dataclass(frozen=True)
class Rows:
    """Packed token ids, and which of them are followed by a token that the target generated: int64 and bool, [rows, length]."""

    ids: Tensor
    before_own: Tensor


def pack_whole(continuations: list[Continuation], length: int, seed: int) -> Rows:
    """Rows of ``length`` tokens that begin with a prompt.

    A continuation that a row's end cuts off comes again, whole, at the start of the next row; none may be longer than a row.
    """
    rows: list[list[tuple[int, bool]]] = []
    row: list[tuple[int, bool]] = []
    for continuation in random.Random(seed).sample(continuations, len(continuations)):
        last = len(continuation.ids) - 1
        sequence = [(token, continuation.prompt_length - 1 <= place < last) for place, token in enumerate(continuation.ids)]
        row = row + sequence
        if len(row) >= length:
            rows.append(row[:length])
            row = sequence if len(row) > length else []
    packed = torch.tensor(rows, dtype=torch.int64).view(-1, length, 2)
    return Rows(packed[..., 0].contiguous(), packed[..., 1].bool())
