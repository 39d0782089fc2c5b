"""Choosing a token from the target's logits: greedily, or sampled with noise that depends only on seed, thread and position.

Shapes: R rows, N tree slots, V vocabulary, P distinct positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import SamplingParams, UserError
from pipedec.device import to_device, to_host
from pipedec.sampling.candidates import SMALL_VOCABULARY, TEMPERATURES, drawn
from pipedec.sampling.filters import History, min_p, tempered, top_k, top_p
from pipedec.sampling.noise import gumbel


def greedy(logits_RV: Tensor) -> Tensor:
    """The most probable token of every row, int64 [R]; of tied tokens the lowest id, on every device."""
    return logits_RV.argmax(dim=-1)


class Sampler:
    """Chooses the tokens of one request. Order as in vLLM: bias, penalties, temperature, min-p, top-k, top-p, sampling.

    Sampling uses the Gumbel trick: the argmax of log-probability + Gumbel noise is an exact sample from the distribution. All
    rows of a decode thread at the same position share their noise.

    Args:
        stream: the noise stream of the decode thread (see ``gumbel``).

    Raises:
        UserError: ``logit_bias`` names a token that is not in the vocabulary.
        ValueError: the parameters are stochastic and have no seed.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu", stream: int = 0) -> None:
        if params.is_stochastic and params.seed is None:
            raise ValueError("stochastic sampling needs a seed: call SamplingParams.seeded() first")
        self._params = params
        self._stream = stream
        self._history = History(vocab_size, device) if params.has_penalties else None
        self._bias_V: Tensor | None = None
        if params.logit_bias:
            self._bias_V = bias_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
            for token, value in params.logit_bias.items():
                if token >= vocab_size:
                    raise UserError(f"logit_bias names token {token}, but the vocabulary has {vocab_size} tokens")
                bias_V[token] = value

    def add_prompt(self, token_ids: Tensor) -> None:
        """Add a chunk of the prompt: int64 [any number]."""
        if self._history is not None:
            self._history.add_prompt(token_ids)

    def add_accepted(self, token_ids: Tensor) -> None:
        """Add committed tokens: int64 [any number]."""
        if self._history is not None:
            self._history.add_accepted(token_ids)

    def choose(self, logits_RV: Tensor, positions_R: Tensor, mask_RN: Tensor, token_ids_N: Tensor) -> Tensor:
        """The token that follows each row, int64 [R].

        Args:
            positions_R: int64, position ids of the tokens to be chosen, on the host.
            mask_RN: bool, which tree slots are on a row's path, the row itself included.
            token_ids_N: int64, the tokens of the tree.
        """
        if self._bias_V is not None:
            logits_RV = logits_RV + self._bias_V
        if self._history is not None:
            logits_RV = self._history.penalised(logits_RV, mask_RN, token_ids_N, self._params)
        coldest, hottest = TEMPERATURES
        is_drawn = self._params.is_stochastic and coldest <= self._params.temperature <= hottest
        if not is_drawn or logits_RV.shape[-1] <= SMALL_VOCABULARY:  # else it saves time to look at the likeliest tokens first
            return greedy(self._perturbed(logits_RV, positions_R))
        chosen_R, is_sure_R = drawn(logits_RV, positions_R, self._params, self._stream)
        unsure = (~is_sure_R).nonzero()[:, 0]
        if len(unsure):
            chosen_R[unsure] = greedy(self._perturbed(logits_RV[unsure], positions_R[to_host(unsure)]))
        return chosen_R

    def scores(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """Scores that rank predictions (e.g. of mask rows) of the tokens that ``choose`` will return at these positions: [R, V].

        The noise is that of the later choice, so a prediction can match it also when tokens are sampled. Penalties are ignored.
        Positions as in ``choose``.
        """
        return self._perturbed(logits_RV if self._bias_V is None else logits_RV + self._bias_V, positions_R)

    def _perturbed(self, logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        """[R, V], scores whose argmax is the token: filtered logits plus noise, or the logits alone if decoding is greedy."""
        params, logits_RV = self._params, logits_RV.double()
        if params.seed is None or not params.is_stochastic:
            return logits_RV
        distinct_P, which_R = (to_device(part, logits_RV.device) for part in positions_R.unique(return_inverse=True))
        noise_PV = gumbel(params.seed, distinct_P, logits_RV.shape[-1], self._stream)  # siblings share their noise
        return filtered(logits_RV, params) + noise_PV.index_select(0, which_R)


def filtered(logits_RV: Tensor, params: SamplingParams) -> Tensor:
    """The logits of the distribution that tokens are sampled from: temperature, min-p, top-k and top-p applied."""
    logits_RV = min_p(tempered(logits_RV, params.temperature), params.min_p)
    return top_p(top_k(logits_RV, params.top_k), params.top_p, params.top_k)
