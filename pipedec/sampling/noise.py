"""Random numbers that are a function of seed, thread, position and token: no generator is advanced, so no order can matter.

Whatever the decoding method, the stage count or the number of rows, the token at a position meets the same noise.

Shapes: P positions, V vocabulary, B blocks of four tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., 2011): four random 32-bit words for every counter of four words.

    Args:
        counters: int64 tensors that broadcast, with values below 2**32.
        key: two numbers below 2**32.

    Returns:
        int64 tensors with values below 2**32. A product of two words wraps in int64, but all its 64 bits are right.
    """
    first, second, third, fourth = counters
    low_key, high_key = key
    for _ in range(_ROUNDS):
        one, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second = (other >> 32 & _WORD) ^ second ^ low_key, other & _WORD
        third, fourth = (one >> 32 & _WORD) ^ fourth ^ high_key, one & _WORD
        low_key, high_key = low_key + _KEY_STEPS[0] & _WORD, high_key + _KEY_STEPS[1] & _WORD
    return first, second, third, fourth


def gumbel(seed: int, positions_P: Tensor, vocab_size: int, stream: int = 0) -> Tensor:
    """Standard Gumbel noise for every token at every position, float64 [P, V].

    Args:
        seed: below 2**64.
        positions_P: int64, below 2**32: where in the sequence (prompt included) the token will stand.
        stream: below 2**32, of one decode thread: two threads may say something at the same position.
    """
    blocks_B = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=positions_P.device)
    nothing = torch.zeros_like(blocks_B)
    counters = blocks_B[None, :], positions_P[:, None], nothing + stream, nothing
    words = torch.stack(philox(counters, (seed & _WORD, seed >> 32)), -1)
    uniform_PV = (words.flatten(1)[:, :vocab_size].double() + 0.5) / 2**32  # above 0 and below 1
    return -(-uniform_PV.log()).log()
