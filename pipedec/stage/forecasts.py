"""Forecasts: the tokens that mask rows predict (BiTA) for the positions after the last accepted token.

Knows logits and trees; knows no model and no cache. Shapes: N rows of the forest, M masks, K tokens per mask, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.forest import Forest
from pipedec.stage.verification import TokenChooser

Forecast = tuple[tuple[int, ...], ...]  # see ``Accepted.forecast``


class Forecasts:
    """The predictions of the mask rows in the forest, ranked as ``chooser`` will choose.

    ``first`` and ``best`` compute them on the device of the logits; their values, read from there, are passed back in one list.

    Args:
        tokens_per_mask: K.
    """

    def __init__(self, chooser: TokenChooser, tokens_per_mask: int) -> None:
        self._chooser = chooser
        self._tokens_per_mask = tokens_per_mask
        self._predictions: list[tuple[int, ...]] = []  # of each of the N rows; empty for other rows than masks

    def first(self, logits_MV: Tensor, position: int) -> Tensor:
        """int64 [M, K], best first, of the masks after the prompt, the first of which predicts the token at ``position``."""
        return self._best(logits_MV, torch.arange(position, position + len(logits_MV)))

    def best(self, logits_MV: Tensor, forest: Forest) -> Tensor:
        """int64 [M, K], best first, of the masks, which are the newest rows of the forest."""
        masks = slice(forest.num_rows - len(logits_MV), forest.num_rows)
        threads = None if forest.threads is None else forest.threads[masks]
        return self._best(logits_MV, forest.positions_of(masks) + 1, threads)

    def add(self, num_tokens: int, best: list[int]) -> None:
        """Add the newest rows of the forest: ``num_tokens`` others, then masks with these predictions, one after the other."""
        self._predictions += [()] * num_tokens + list(self.forecast(best))

    def forecast(self, best: list[int]) -> Forecast:
        """The predictions of masks, one after the other, as a forecast."""
        size = self._tokens_per_mask
        return tuple(tuple(best[first : first + size]) for first in range(0, len(best), size))

    def keep(self, rows: list[int]) -> None:
        """Drop all rows except ``rows``."""
        self._predictions = [self._predictions[row] for row in rows]

    def after(self, forest: Forest, verified_rows: list[int]) -> Forecast:
        """The predictions for the positions after the last accepted token, by the masks below the last row that has any.

        If that row has ``num_later`` verified rows below it, its first ``num_later`` masks predict tokens that are accepted
        already, and are skipped.

        Args:
            verified_rows: rows of one thread whose successors were accepted, in order.
        """
        for num_later, row in enumerate(reversed(verified_rows)):
            if masks := _masks_below(forest, row):
                return tuple(self._predictions[mask] for mask in masks[num_later:])
        return ()

    def _best(self, logits_MV: Tensor, positions_M: Tensor, threads_M: Tensor | None = None) -> Tensor:
        return self._chooser.scores(logits_MV, positions_M, threads_M).topk(self._tokens_per_mask, dim=1).indices


def _masks_below(forest: Forest, row: int) -> list[int]:
    """The rows of the group of masks below ``row``, in order; empty if it has none."""
    masks: list[int] = []
    child = forest.child(row, -1)
    while child is not None:
        masks.append(child)
        child = forest.child(child, -1 - len(masks))
    return masks
