"""Forecasts: the tokens that mask rows predict (BiTA) for the positions after the last accepted token.

Knows logits and trees; knows no model and no cache. Shapes: N rows of the forest, M masks, K tokens per mask, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.forest import Forest
from pipedec.stage.token_chooser import TokenChooser

Forecast = tuple[tuple[int, ...], ...]  # see ``Accepted.forecast``


class Forecasts:
    """The predictions of the mask rows in the forest. They are ranked as ``chooser`` will choose.

    Args:
        tokens_per_mask: K; 0 for a request without masks.
    """

    def __init__(self, chooser: TokenChooser, tokens_per_mask: int, device: torch.device | str) -> None:
        self._chooser = chooser
        self._predictions = torch.zeros(0, tokens_per_mask, dtype=torch.int64, device=device)  # [N, K], 0 for other rows

    @property
    def _tokens_per_mask(self) -> int:
        return self._predictions.shape[1]

    def first(self, logits_MV: Tensor, position: int) -> Forecast:
        """The forecast of the masks after the prompt, the first of which predicts the token at ``position``."""
        if not self._tokens_per_mask:
            return ()
        positions = torch.arange(position, position + len(logits_MV), device=logits_MV.device)
        return _as_tuples(self._best(self._chooser.scores(logits_MV, positions)))

    def add(self, logits_RV: Tensor, forest: Forest, num_masks: int) -> None:
        """Add the newest rows of the forest, of which the last ``num_masks`` are masks."""
        if not self._tokens_per_mask:
            return
        masks = slice(forest.num_rows - num_masks, forest.num_rows)
        num_tokens, threads = len(logits_RV) - num_masks, None if forest.threads is None else forest.threads[masks]
        scores_MV = self._chooser.scores(logits_RV[num_tokens:], forest.positions[masks] + 1, threads)
        others = self._predictions.new_zeros(num_tokens, self._tokens_per_mask)
        self._predictions = torch.cat((self._predictions, others, self._best(scores_MV)))

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except ``rows``: int64."""
        if self._tokens_per_mask:
            self._predictions = self._predictions[rows]

    def after(self, forest: Forest, verified_rows: list[int]) -> Forecast:
        """The predictions for the positions after the last accepted token, by the masks below the last row that has any.

        If that row has ``num_later`` verified rows below it, its first ``num_later`` masks stand for tokens that are accepted
        already, and are skipped.

        Args:
            verified_rows: rows of one thread whose successors were accepted, in order.
        """
        for num_later, row in enumerate(reversed(verified_rows) if self._tokens_per_mask else ()):
            if masks := _masks_below(forest, row):
                return _as_tuples(self._predictions[masks[num_later:]])
        return ()

    def _best(self, scores_MV: Tensor) -> Tensor:
        """int64 [M, K], best first."""
        return scores_MV.topk(self._tokens_per_mask, dim=1).indices


def _masks_below(forest: Forest, row: int) -> list[int]:
    """The rows of the group of masks below ``row``, in order; empty if it has none."""
    masks: list[int] = []
    child = forest.child(row, -1)
    while child is not None:
        masks.append(child)
        child = forest.child(child, -1 - len(masks))
    return masks


def _as_tuples(token_ids: Tensor) -> Forecast:
    return tuple(map(tuple, token_ids.tolist()))
