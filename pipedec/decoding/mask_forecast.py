"""The predictions of a BiTA's masks after a path of tokens, and the chances that they are right.

Knows no trees. Without a Markov table, a prediction depends on its position alone. Shapes: K predictions of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipedec.core.stage_message import MaskParams
from pipedec.core.verdict import SURPRISAL_UNIT
from pipedec.model.markov import MarkovTable

Chances = NDArray[np.floating]  # [K]
_PRIOR_CHANCE = 0.25  # of a mask's first prediction, if surprisals are unknown; those of the others fall with a power of the rank
_PRIOR_POWER = 1.2
_PRIOR_TRIALS = 8.0
_BINS = 16  # of surprisals; the last one has all greater ones
_BINS_PER_NAT = 2


@dataclass(frozen=True)
class MaskForecast:
    """Predictions for the positions after a thread's last accepted token.

    Attributes:
        root: the last accepted token.
        tokens: for each position after it, the predicted tokens, best first.
        surprisals: see ``Accepted``. Empty if they are unknown: then the order is that of ``tokens``.
        first: number of the mask that predicts the first position. A short forecast comes from the last masks of a group.
        markov: ranks a mask's predictions by the token before them.
        scale: factor on the table's logits: those of sampled tokens are divided by the temperature.
    """

    root: int
    tokens: Sequence[Sequence[int]] = ()
    surprisals: Sequence[Sequence[int]] = ()
    first: int = 0
    markov: MarkovTable | None = None
    scale: float = 1.0

    def after(self, path: Sequence[int]) -> tuple[Sequence[int], Chances]:
        """The tokens predicted after ``path``, which begins after the root, best first, and their probabilities by the mask and
        the table; none if the forecast is shorter.
        """
        place = len(path)
        if place >= len(self.tokens):
            return (), np.empty(0)
        tokens = self.tokens[place]
        if not self.surprisals:
            return tokens, _PRIOR_CHANCE / np.arange(1, len(tokens) + 1) ** _PRIOR_POWER
        scores = np.array(self.surprisals[place]) * -SURPRISAL_UNIT
        if self.markov is None:
            return tokens, np.exp(scores)
        others = max(1 - np.exp(scores).sum(), 0.0)  # the tokens that the mask does not name: the table does not rank them
        scores += np.nan_to_num(self.scale * self.markov.bias(self.first + place, path[-1] if path else self.root, tokens))
        order = np.argsort(-scores, kind="stable")
        shares = np.exp(scores - (top := max(scores[order[0]], 0.0)))
        return [tokens[index] for index in order], shares[order] / (shares.sum() + others * np.exp(-top))


class Confidence:
    """The share of a mask's predictions that were accepted, once all before them were, by their probability."""

    def __init__(self, masks: MaskParams) -> None:
        prior = np.exp(-(np.arange(_BINS) + 0.5) / _BINS_PER_NAT)
        self._trials = np.full((masks.count, _BINS), _PRIOR_TRIALS)
        self._hits = np.tile(prior * _PRIOR_TRIALS, (masks.count, 1))

    def observe(self, forecast: MaskForecast, tokens: Sequence[int]) -> None:
        """Learn that ``tokens`` were accepted at the positions of ``forecast``."""
        for place, token in enumerate(tokens[: len(forecast.tokens)]):
            predicted, probabilities = forecast.after(tokens[:place])
            bins = _bins(probabilities)
            np.add.at(self._trials[forecast.first + place], bins, 1)
            if token in predicted:
                self._hits[forecast.first + place, bins[predicted.index(token)]] += 1

    def of(self, mask: int, probabilities: Chances) -> list[float]:
        """The chances of predictions of a mask with these probabilities."""
        bins = _bins(probabilities)
        chances: list[float] = (self._hits[mask, bins] / self._trials[mask, bins]).tolist()
        return chances


def _bins(probabilities: Chances) -> NDArray[np.int64]:
    return np.clip(-_BINS_PER_NAT * np.log(np.maximum(probabilities, 1e-30)), 0, _BINS - 1).astype(np.int64)
