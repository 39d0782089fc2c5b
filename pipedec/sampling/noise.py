"""Random numbers as a function of seed, thread, position and token. There is no generator state, so no order matters.

A token at a position gets the same noise with every decoding method and any number of stages or rows.

Shapes: P positions, V vocabulary, B blocks of four tokens; R rows with K tokens each.
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
        int64 tensors with values below 2**32. Products of two words wrap around in int64, but all their 64 bits are correct.
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
        positions_P: int64, below 2**32, position ids of the tokens to be chosen (the prompt counts).
        stream: below 2**32; distinguishes decode threads, since two threads may have tokens at the same position.
    """
    blocks_B = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=positions_P.device)
    words = torch.stack(_words(seed, blocks_B[None, :], positions_P[:, None], stream), -1)
    return _gumbel(words.flatten(1)[:, :vocab_size])


def gumbel_of(seed: int, positions_R1: Tensor, token_ids_RK: Tensor, stream: int = 0) -> Tensor:
    """The same noise for these tokens only, float64 [R, K], up to the rounding of its logarithms."""
    words = torch.stack(_words(seed, token_ids_RK // 4, positions_R1, stream), -1)
    return _gumbel(words.gather(-1, (token_ids_RK % 4)[..., None]).squeeze(-1))


def _words(seed: int, blocks: Tensor, positions: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    zeros = torch.zeros_like(blocks)
    return philox((blocks, positions, zeros + stream, zeros), (seed & _WORD, seed >> 32))


def _gumbel(words: Tensor) -> Tensor:
    uniform = (words.double() + 0.5) / 2**32  # above 0 and below 1
    return -(-uniform.log()).log()
