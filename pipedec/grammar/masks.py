"""Bitmasks as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipedec.grammar.grammar import Bitmask


def mask_logits(logits_RV: Tensor, allowed: Sequence[Bitmask]) -> Tensor:
    """A copy of the logits in which those of tokens that are not allowed are −inf. V may differ from the number of bits.

    A row of which none of the V tokens is allowed is on an impossible path: its logits stay.
    """
    packed_RB = _packed(allowed, logits_RV.shape[1])
    packed_RB[~packed_RB.any(1)] = 255
    return logits_RV.masked_fill(_unpacked(~packed_RB, logits_RV.shape[1], logits_RV.device), -torch.inf)


def allowed_tokens(allowed: Sequence[Bitmask], vocab_size: int, device: torch.device | str) -> Tensor:
    """bool [R, V]: of each of R bitmasks, the tokens in it."""
    return _unpacked(_packed(allowed, vocab_size), vocab_size, device)


def _packed(allowed: Sequence[Bitmask], vocab_size: int) -> npt.NDArray[np.uint8]:
    """[R, B], the bits of V tokens, followed by zeros."""
    packed_RB = np.zeros((len(allowed), -(-vocab_size // 8)), np.uint8)
    for row, mask in zip(packed_RB, allowed, strict=True):
        bits = np.frombuffer(mask.bits, np.uint8)[: len(row)]
        row[: len(bits)] = bits
    packed_RB[:, -1] &= 255 >> -vocab_size % 8
    return packed_RB


def _unpacked(packed_RB: npt.NDArray[np.uint8], vocab_size: int, device: torch.device | str) -> Tensor:
    """bool [R, V]. One bit per token is sent to the device."""
    bits_8 = torch.arange(8, dtype=torch.uint8, device=device)
    return (torch.from_numpy(packed_RB).to(device)[:, :, None] >> bits_8 & 1).bool().flatten(1)[:, :vocab_size]
