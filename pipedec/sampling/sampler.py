"""How a token is chosen from the target's logits: the likeliest, or one drawn by noise that depends on seed and position alone.

Shapes: R rows, N tree slots, V vocabulary.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import torch
from torch import Tensor

from pipedec.core import SamplingParams, UserError
from pipedec.sampling.filters import min_p, tempered, top_k, top_p
from pipedec.sampling.noise import gumbel
from pipedec.sampling.penalties import History

_DRAWN_SEED_BITS = 53  # every reader of JSON has such numbers exactly


def greedy(logits_RV: Tensor) -> Tensor:
    """The likeliest token of every row, int64 [R]; among equals the lowest id, on every device."""
    return logits_RV.argmax(dim=-1)


class Sampler:
    """Chooses the tokens of one request, in vLLM's order: bias, penalties, temperature, min-p, top-k, top-p, draw.

    Drawing is the Gumbel trick: the largest of log-probability + noise is an exact draw from the distribution, and the noise
    at a position is the same for every row of a decode thread that stands there.

    Args:
        stream: the thread's noise (see ``gumbel``).

    Raises:
        UserError: a biased token is not in the vocabulary.
        ValueError: there is something to draw and no seed.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu", stream: int = 0) -> None:
        if params.is_stochastic and params.seed is None:
            raise ValueError("a seed must be drawn before the request is begun")
        self._params = params
        self._stream = stream
        self._history = History(vocab_size, device) if params.has_penalties else None
        self._bias_V = _bias(params.logit_bias, vocab_size, device) if params.logit_bias else None

    @classmethod
    def create(
        cls, params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu", stream: int = 0
    ) -> Sampler | None:
        """The request's sampler; None where ``greedy`` alone decides."""
        return None if params.is_plainly_greedy else cls(params, vocab_size, device, stream)

    def add_prompt(self, token_ids: Tensor) -> None:
        """Take in a chunk of the prompt: int64."""
        if self._history is not None:
            self._history.add_prompt(token_ids)

    def add_accepted(self, token_ids: Tensor) -> None:
        """Take in accepted tokens that leave the tree: int64."""
        if self._history is not None:
            self._history.add_accepted(token_ids)

    def choose(self, logits_RV: Tensor, positions_R: Tensor, mask_RN: Tensor, token_ids_N: Tensor) -> Tensor:
        """The token that follows each row, int64 [R].

        Args:
            positions_R: int64, where those tokens will stand.
            mask_RN: bool, which slots of the tree are on a row's path (itself included).
            token_ids_N: int64, the tokens of the tree.
        """
        params, logits_RV = self._params, logits_RV.double()
        if self._bias_V is not None:
            logits_RV = logits_RV + self._bias_V
        if self._history is not None:
            logits_RV = self._history.penalised(logits_RV, mask_RN, token_ids_N, params)
        return greedy(self._drawn(logits_RV, positions_R))

    def scores(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """[R, V]: by which to guess what ``choose`` will say at these positions, from logits that somebody else has predicted.

        Penalties are left out. The noise is that of the choice to come, so that a good guess meets it also where it is drawn.
        """
        return self._drawn(logits_RV.double() if self._bias_V is None else logits_RV + self._bias_V, positions_R)

    def _drawn(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """Scores whose largest is the token: with noise where tokens are drawn."""
        params = self._params
        if params.seed is None or not params.is_stochastic:
            return logits_RV
        distinct_P, which_R = positions_R.unique(return_inverse=True)  # siblings share their noise
        noise_RV = gumbel(params.seed, distinct_P, logits_RV.shape[-1], self._stream)[which_R]
        return filtered(logits_RV, params) + noise_RV


def filtered(logits_RV: Tensor, params: SamplingParams) -> Tensor:
    """The logits of the distribution that tokens are drawn from."""
    logits_RV = min_p(tempered(logits_RV, params.temperature), params.min_p)
    return top_p(top_k(logits_RV, params.top_k), params.top_p, params.top_k)


def seeded(params: SamplingParams) -> SamplingParams:
    """The parameters, with a seed drawn if one is needed and none is given."""
    if params.seed is not None or not params.is_stochastic:
        return params
    return replace(params, seed=secrets.randbits(_DRAWN_SEED_BITS))


def _bias(logit_bias: dict[int, float], vocab_size: int, device: torch.device | str) -> Tensor:
    bias_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
    for token, value in logit_bias.items():
        if token >= vocab_size:
            raise UserError(f"logit_bias names token {token}, but the vocabulary has {vocab_size} tokens")
        bias_V[token] = value
    return bias_V
