"""How likely a proposed token is to be accepted: a choice model over the proposers' features, learned from the verdicts.

The next token after a drafted row is one of its K choices or another: a conditional logit, P(i) = exp(w·f_i) / Σ_j exp(w·f_j).
Every verdict whose token follows a drafted row is one observation, whether the choice was in flight or not, so nothing is learned
from what happened to be tried alone. A draft's probability is a feature like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.decoding.choices import NO_TOKEN, Choices

_RATE = 0.3  # of AdaGrad


class Acceptance:
    """Weights w of W features, from their prior on."""

    def __init__(self, prior: tuple[float, ...], device: torch.device | str = "cpu") -> None:
        self.weights = torch.tensor((*prior, 0.0), device=device)  # the last one: none of the named tokens
        self._squares = torch.ones_like(self.weights)  # of all steps so far, of each weight

    def log_chances(self, choices: Choices) -> Tensor:
        """[D, K]: log of the chance of each choice, given that its row is accepted; −∞ where there is none."""
        return self._log_probs(choices.token_ids, choices.features)[:, :-1]

    def observe(self, choices: Choices, row: int, token: int) -> bool | None:
        """``token`` was accepted after the tree's ``row``: one step of gradient ascent on its log-probability.

        Returns whether it was named; None when the row was never drafted, so that there is nothing to learn.
        """
        found = torch.nonzero(choices.rows == row)
        if not len(found):
            return None
        index = int(found[0, 0])
        token_ids, features = choices.token_ids[index : index + 1], choices.features[index : index + 1]
        wanted = torch.cat((token_ids[0] == token, token_ids.new_ones(1).bool()))
        wanted[-1] = not bool(wanted[:-1].any())
        surprise = wanted.float() - self._log_probs(token_ids, features)[0].exp()
        step = surprise @ _with_last(features)[0]
        self._squares += step * step
        self.weights += _RATE * step / self._squares.sqrt()
        return not bool(wanted[-1])

    def _log_probs(self, token_ids: Tensor, features: Tensor) -> Tensor:
        scores = _with_last(features) @ self.weights
        scores[:, :-1].masked_fill_(token_ids == NO_TOKEN, -torch.inf)
        return scores.log_softmax(-1)


def _with_last(features: Tensor) -> Tensor:
    """[D, K + 1, W + 1]: one more feature, 1 for all tokens that nobody named."""
    last = torch.zeros_like(features[..., :1])
    last[:, -1] = 1
    return torch.cat((features, last), -1)
