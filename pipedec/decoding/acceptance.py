"""The probability that a proposed token is accepted: a conditional logit over the features of draft sources, learned online.

The next token after a drafted row is one of its K choices or some other token: P(i) = exp(w·f_i) / Σ_j exp(w·f_j). Every accepted
token that follows a drafted row is one observation, whether or not it was in flight, so the estimate is not biased by which
choices entered the pipeline. The draft model's probability is a feature like any other.

Products, exponentials and roots are torch's; all else is numpy's, which takes less time over so few numbers.
"""

from __future__ import annotations

import numpy as np
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
        self._weights = self.weights.numpy()  # the same memory
        self._squares = torch.ones_like(self.weights)  # [W + 1], sums of squared gradients

    def log_chances(self, choices: Choices) -> Tensor:
        """[F, K], log-probability that each choice is accepted, given that its row is; −∞ for NO_TOKEN."""
        return self._log_probs(choices.token_ids, choices.features)[:, :-1]

    def observe(self, choices: Choices, place: int, token: int) -> bool:
        """Learn that ``token`` was accepted after row ``place``: one step of gradient ascent on its log-probability.

        Returns:
            whether the token was among the row's choices.
        """
        token_ids, features = choices.token_ids[place], choices.features[place]
        residual = self._log_probs(token_ids, features).exp_().neg_()
        on_host, proposed = residual.numpy(), (token_ids.numpy() == token).nonzero()[0]
        was_proposed = len(proposed) > 0
        on_host[proposed[0] if was_proposed else -1] += 1
        gradient = np.append((residual @ features).numpy(), on_host[-1])
        self._squares += torch.from_numpy(gradient * gradient)
        self._weights += _LEARNING_RATE * gradient / self._squares.sqrt().numpy()
        return was_proposed

    def _log_probs(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """[…, K + 1] for token_ids […, K] and features […, K + 1, W]; the last for "none of the choices"."""
        scores = features @ self.weights[:-1]
        on_host = scores.numpy()
        on_host[..., -1] += self._weights[-1]
        on_host[..., :-1][token_ids.numpy() == NO_TOKEN] = -np.inf
        return scores.log_softmax(-1)
