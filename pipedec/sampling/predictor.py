"""Predictions of the tokens that a request will choose: those of a draft or of masks, with the request's bias, filters and noise.

The noise of sampled tokens is a function of seed, thread and position. A draft whose distribution is the target's then predicts
every sampled token (Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
https://arxiv.org/abs/2408.07978).

Shapes: R rows, D tokens that are predicted, V tokens of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipedec.core.sampling import SamplingParams
from pipedec.sampling.candidates import clamped_temperature, least_kept
from pipedec.sampling.noise import gumbel, gumbel_of
from pipedec.sampling.sampler import bias_of

_BLOCK = 4  # consecutive positions whose noise is computed together: on a GPU that takes hardly longer than one
_KEPT = 16  # blocks; rows of a tree are drafted at the same positions again and again
_CANDIDATES = 256  # the most probable tokens, which the filters keep or drop
_IMPOSSIBLE = -1e9  # a logarithm that is as good as −∞ and remains a number when rows are subtracted


class TokenPredictor:
    """Predicts which tokens one request will choose. Penalties are ignored.

    The target's filters may keep a token that they would drop from these predictions. Such a token is not impossible: its logit
    is put twice as far below the lowest one that is kept.

    Args:
        vocab_size: V.
        tokens_D: int64, the target's token for each that is predicted; None if they are the same.
    """

    def __init__(
        self, sampling: SamplingParams, vocab_size: int, device: torch.device | str, tokens_D: Tensor | None = None
    ) -> None:
        self._sampling, self._vocab_size, self._device, self._tokens_D = sampling, vocab_size, device, tokens_D
        bias_V = bias_of(sampling, vocab_size, device)
        self._bias_D = bias_V if bias_V is None or tokens_D is None else bias_V[tokens_D]
        self._blocks: dict[tuple[int, int], Tensor] = {}  # by stream and number, [_BLOCK, D]

    @classmethod
    def of(
        cls, sampling: SamplingParams, vocab_size: int, device: torch.device | str, tokens_D: Tensor | None = None
    ) -> TokenPredictor | None:
        """The predictor of a request; None if its parameters change no prediction."""
        return cls(sampling, vocab_size, device, tokens_D) if sampling.is_stochastic or sampling.logit_bias else None

    def log_probs(self, logits_RD: Tensor, positions: Sequence[int], stream: int) -> Tensor:
        """[R, D], the logarithm of the probability that each token is chosen, given the noise. −∞ stays −∞.

        Args:
            logits_RD: of the target's distribution, as predicted.
            positions: R position ids of the tokens to be chosen.
            stream: of the decode thread (see ``gumbel``).
        """
        possible_RD = logits_RD.clamp(min=_IMPOSSIBLE)
        if self._bias_D is not None:
            possible_RD = possible_RD + self._bias_D.to(possible_RD.dtype)
        if self._sampling.is_stochastic:
            possible_RD = self._filtered(possible_RD) + self._noise(positions, stream)
        return possible_RD.log_softmax(-1).masked_fill(logits_RD.isneginf(), -torch.inf)

    def _filtered(self, logits_RD: Tensor) -> Tensor:
        tempered_RD = (logits_RD - logits_RD.amax(-1, keepdim=True)) / clamped_temperature(self._sampling.temperature)
        least_R1 = least_kept(logits_RD, self._sampling, _CANDIDATES)
        if least_R1 is None:
            return tempered_RD
        return tempered_RD - (least_R1 - tempered_RD).clamp(min=0).to(tempered_RD.dtype)

    def _noise(self, positions: Sequence[int], stream: int) -> Tensor:
        blocks = {place: self._block(*place) for place in sorted({(stream, position // _BLOCK) for position in positions})}
        for place in list(self._blocks)[:-_KEPT]:
            del self._blocks[place]
        return torch.stack([blocks[stream, position // _BLOCK][position % _BLOCK] for position in positions])

    def _block(self, stream: int, number: int) -> Tensor:
        noise = self._blocks.pop((stream, number), None)
        if noise is None:
            assert self._sampling.seed is not None
            positions = torch.arange(number * _BLOCK, (number + 1) * _BLOCK, device=self._device)
            if self._tokens_D is None:
                noise = gumbel(self._sampling.seed, positions, self._vocab_size, stream).float()
            else:
                noise = gumbel_of(self._sampling.seed, positions[:, None], self._tokens_D.expand(_BLOCK, -1), stream).float()
        self._blocks[stream, number] = noise  # the last one, as it was used last
        return noise
