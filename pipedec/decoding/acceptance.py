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

from pipedec.decoding.learned import Priors

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
_LEARNED_SQUARES = 4.0  # sums of squared gradients with which earlier learned weights begin
_TRIAL = 64  # observations after which earlier learned weights are dropped if those learned from the prior predict better
_DOUBT = 3.0  # nats by which they must be worse to be dropped before
_OTHERS = "others", "none of the choices"  # source and feature of the last weight


class AcceptanceModel:
    """The weights w of the W features, at first ``prior``, and a weight for "none of the choices".

    The features of a source are consecutive, and both are in the order of ``prior``.
    """

    name = "acceptance"

    def __init__(self, prior: Priors) -> None:
        self._prior = prior
        self._names = [*((source, feature) for source, features in prior.items() for feature in features), _OTHERS]
        self.weights = torch.tensor([prior.get(source, {}).get(feature, 0.0) for source, feature in self._names])  # [W + 1]
        self._of_features = self.weights[:-1]  # the same memory, as the next
        self._on_host = self.weights.numpy()
        self._gradient = np.zeros_like(self._on_host)  # of the last observation
        self._gradient_of_features = torch.from_numpy(self._gradient)[:-1]  # the same memory
        self._squares = torch.ones_like(self.weights)  # [W + 1], sums of squared gradients
        self._squares_on_host = self._squares.numpy()  # the same memory
        self._rival: AcceptanceModel | None = None  # learns from ``prior`` beside weights that are on trial
        self._observed = 0  # in the trial
        self._deficit = 0.0  # nats by which the rival's predictions were better

    @property
    def learned(self) -> dict[str, dict[str, float]]:
        """The weights by source and feature."""
        found: dict[str, dict[str, float]] = {}
        for (source, feature), weight in zip(self._names, self.weights.tolist(), strict=True):
            found.setdefault(source, {})[feature] = weight
        return found

    def start_from(self, learned: Priors) -> None:
        """Continue with weights that another model has learned, without those of sources and features that this one lacks.

        Wrong ones are soon dropped: a second model learns from the prior, and takes over if it predicts better.
        """
        self._rival = AcceptanceModel(self._prior)
        self._observed, self._deficit = 0, 0.0
        self._squares.fill_(_LEARNED_SQUARES)
        for place, (source, feature) in enumerate(self._names):
            self.weights[place] = learned.get(source, {}).get(feature, self.weights[place])

    def log_chances(self, choices: Choices) -> Tensor:
        """[F, K], log-probability that each choice is accepted, given that its row is; −∞ for NO_TOKEN."""
        return self._log_probs(choices.token_ids.numpy(), choices.features)[:, :-1]

    def observe(self, choices: Choices, place: int, token: int) -> bool:
        """Learn from ``token``, accepted after row ``place``. Returns whether it was a choice."""
        column, log_chance = self._learn(choices, place, token)
        if self._rival is not None:
            self._observed += 1
            self._deficit += self._rival._learn(choices, place, token)[1] - log_chance
            ends = self._observed == _TRIAL or self._deficit > _DOUBT
            if ends and self._deficit > 0:
                self.weights.copy_(self._rival.weights)
                self._squares.copy_(self._rival._squares)
            if ends:
                self._rival = None
        return column >= 0

    def _learn(self, choices: Choices, place: int, token: int) -> tuple[int, float]:
        """Take one step of gradient ascent. Returns the token's column (−1 if it was no choice) and log-probability."""
        token_ids, features = choices.token_ids.numpy()[place], choices.features[place]
        proposed = token_ids.tolist()
        column = proposed.index(token) if token in proposed else -1
        residual = self._log_probs(token_ids, features)
        on_host = residual.numpy()
        log_chance = float(on_host[column])
        residual.exp_().neg_()
        on_host[column] += 1
        torch.mv(features.t(), residual, out=self._gradient_of_features)
        gradient = self._gradient
        gradient[-1] = on_host[-1]
        self._squares_on_host += gradient * gradient
        self._on_host += _LEARNING_RATE * gradient / np.sqrt(self._squares_on_host)
        return column, log_chance

    def _log_probs(self, token_ids: IntArray, features: Tensor) -> Tensor:
        """[…, K + 1] for token_ids […, K] and features […, K + 1, W]; the last for "none of the choices"."""
        scores = features @ self._of_features
        on_host = scores.numpy()
        on_host[..., -1] += self._on_host[-1]
        np.copyto(on_host[..., :-1], -np.inf, where=token_ids == NO_TOKEN)
        return scores.log_softmax(-1)
