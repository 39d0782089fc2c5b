"""The probability that a proposed token is accepted: a conditional logit over the features of draft sources, learned online.

The next token after a drafted row is one of its K choices or some other token: P(i) = exp(w·f_i) / Σ_j exp(w·f_j). Every accepted
token that follows a drafted row is one observation, whether or not it was in flight, so the estimate is not biased by which
choices entered the pipeline. The draft model's probability is a feature like any other. Knows no tree and no draft source.

torch computes products, exponentials and roots; numpy does the rest, because it is faster for so few numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_TOKEN = -1
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Choices:
    """The tokens that may follow F rows of trees, proposed by all sources together, on the host."""

    token_ids: Tensor  # int64 [F, K], distinct within a row; NO_TOKEN marks unused entries
    features: Tensor  # float32 [F, K + 1, W]; the last entry of a row stands for "none of the choices"


class Line(NamedTuple):
    """The choices below one row, on the host."""

    token_ids: list[int]
    log_chances: list[float]  # of each, given that the row is accepted, best first. Values beyond the tokens are meaningless.
    choices: Choices | None  # the choices that contain them, with their features
    place: int  # of the row in ``choices``


NO_LINE = Line([], [], None, 0)  # of a row without possible successors
_LEARNING_RATE = 0.5  # of AdaGrad


class AcceptanceModel:
    """The weights w of the W features, at first ``prior``, and a weight for "none of the choices"."""

    def __init__(self, prior: tuple[float, ...]) -> None:
        self.weights = torch.tensor((*prior, 0.0))  # [W + 1], the last for "none of the choices"
        self._of_features = self.weights[:-1]  # the same memory, as the next
        self._on_host = self.weights.numpy()
        self._gradient = np.zeros_like(self._on_host)  # of the last observation
        self._gradient_of_features = torch.from_numpy(self._gradient)[:-1]  # the same memory
        self._squares = torch.ones_like(self.weights)  # [W + 1], sums of squared gradients
        self._squares_on_host = self._squares.numpy()  # the same memory

    def log_chances(self, choices: Choices) -> Tensor:
        """[F, K], log-probability that each choice is accepted, given that its row is; −∞ for NO_TOKEN."""
        return self._log_probs(choices.token_ids.numpy(), choices.features)[:, :-1]

    def observe(self, choices: Choices, place: int, token: int) -> bool:
        """Learn from ``token``, accepted after row ``place``, by one step of gradient ascent. Returns whether it was a choice."""
        token_ids, features = choices.token_ids.numpy()[place], choices.features[place]
        proposed = token_ids.tolist()
        was_proposed = token in proposed
        residual = self._log_probs(token_ids, features).exp_().neg_()
        on_host = residual.numpy()
        on_host[proposed.index(token) if was_proposed else -1] += 1
        torch.mv(features.t(), residual, out=self._gradient_of_features)
        gradient = self._gradient
        gradient[-1] = on_host[-1]
        self._squares_on_host += gradient * gradient
        self._on_host += _LEARNING_RATE * gradient / self._squares.sqrt().numpy()
        return was_proposed

    def _log_probs(self, token_ids: IntArray, features: Tensor) -> Tensor:
        """[…, K + 1] for token_ids […, K] and features […, K + 1, W]; the last for "none of the choices"."""
        scores = features @ self._of_features
        on_host = scores.numpy()
        on_host[..., -1] += self._on_host[-1]
        np.copyto(on_host[..., :-1], -np.inf, where=token_ids == NO_TOKEN)
        return scores.log_softmax(-1)
