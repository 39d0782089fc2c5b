"""The probability that a proposed token is accepted: a conditional logit over the features of draft sources, learned online.

The next token after a drafted row is one of its K choices or some other token: P(i) = exp(w·f_i) / Σ_j exp(w·f_j). Every accepted
token that follows a drafted row is one observation, whether or not it was in flight, so the estimate is not biased by which
choices entered the pipeline. The draft model's probability is a feature like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.decoding.choices import NO_TOKEN, Choices

_LEARNING_RATE = 0.3  # of AdaGrad


class Acceptance:
    """The model's W feature weights w, and one for "none of the choices".

    Args:
        prior: initial weights.
    """

    def __init__(self, prior: tuple[float, ...]) -> None:
        self.weights = torch.tensor((*prior, 0.0))  # [W + 1], the last for "none of the choices"
        self._squares = torch.ones_like(self.weights)  # [W + 1], sums of squared gradients

    def log_chances(self, choices: Choices) -> Tensor:
        """[F, K], log-probability that each choice is accepted, given that its row is; −∞ for NO_TOKEN."""
        return self._log_probs(choices.token_ids, choices.features)[:, :-1]

    def observe(self, choices: Choices, place: int, token: int) -> bool:
        """Learn that ``token`` was accepted after row ``place``: one step of gradient ascent on its log-probability.

        Returns:
            whether the token was among the row's choices.
        """
        token_ids, features = choices.token_ids[place : place + 1], choices.features[place]
        residual = self._log_probs(token_ids, features[None])[0].exp_().neg_()
        proposed = torch.nonzero(token_ids[0] == token)
        was_proposed = len(proposed) > 0
        residual[proposed[0, 0] if was_proposed else -1] += 1
        gradient = torch.cat((residual @ features, residual[-1:]))
        self._squares += gradient * gradient
        self.weights += _LEARNING_RATE * gradient / self._squares.sqrt()
        return was_proposed

    def _log_probs(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """[F, K + 1], the last for "none of the choices"."""
        scores = features @ self.weights[:-1]
        scores[:, -1] += self.weights[-1]
        scores[:, :-1].masked_fill_(token_ids == NO_TOKEN, -torch.inf)
        return scores.log_softmax(-1)
