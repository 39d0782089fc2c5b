"""BiTA (``bita``): the target drafts for itself, with mask rows and a learned prompt. No draft model is needed.

A step is a tree: the last accepted token, candidates for the tokens after it, and groups of masks behind them. One pass over all
stages verifies the candidates and forecasts the next ones (BiTA §3.2, Algorithm 1): the verdict brings, with the accepted tokens,
what the masks behind the last accepted candidate name for the places after them. Nothing of a tree outlives its verdict but the
accepted rows, so this class keeps no tree and computes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import MaskParams, Request, Step, UserError, Verdict
from pipedec.decoding.controller import Beat
from pipedec.tree import mask_groups

Forecast = tuple[tuple[int, ...], ...]
PAPER_NAMED = 5  # candidates of each mask (BiTA §4.1)
MAX_NAMED = 64  # of all masks together: a verdict has to fit into a message's header
MAX_ROWS = 4096


class Bita:
    """One tree per passage of the pipeline, as ``request.tree`` shapes it.

    Args:
        trained_masks: masks that the target's BiTA was trained with; 0 if it has none.

    Raises:
        UserError: there is no BiTA, or it has fewer masks than the request's depth, or the tree is too large.
    """

    def __init__(self, request: Request, trained_masks: int, device: torch.device | str = "cpu") -> None:
        if not trained_masks:
            raise UserError("method bita needs what pipedec train bita has learned for this target: give --bita DIR")
        limits = request.tree
        depth = limits.depth or trained_masks
        if depth > trained_masks:
            raise UserError(f"tree depth {depth}, but this BiTA was trained with {trained_masks} masks: lower --depth")
        named = 1 if limits.shape == "straightforward" else limits.children or min(PAPER_NAMED, MAX_NAMED // depth)
        if depth * named > MAX_NAMED:
            raise UserError(f"{depth} masks that name {named} tokens each are more than {MAX_NAMED}: lower --depth or --children")
        self.masks = MaskParams(depth, named)
        self._shape = limits.shape
        if (num_rows := self._num_rows()) > MAX_ROWS:
            raise UserError(f"a tree of {num_rows} rows is more than {MAX_ROWS}: lower --depth or --children")
        self.hits = 0
        self.misses = 0
        self._device = device
        self._root: int | None = None
        self._forecast: Forecast = ()

    def prefill(self, token_ids: Tensor) -> None:
        """Nothing to prepare: there is no draft."""

    def draft(self) -> None:
        """Nothing to compute: the stages did."""

    def apply(self, verdict: Verdict) -> None:
        self._root = verdict.tokens[-1] if verdict.finished is None else None
        self._forecast = verdict.forecast
        self.hits += len(verdict.tokens) - 1
        self.misses += verdict.finished is None

    def propose(self) -> Step | None:
        """The root, its tree of candidates, then the masks."""
        if self._root is None:
            return None
        token_ids, parents = candidate_tree(self._root, self._forecast, is_full=self._shape == "full")
        self._root = None
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        with_masks = torch.arange(1 if self._shape == "straightforward" else len(tokens), device=self._device)
        masks, behind = mask_groups(with_masks, len(tokens), self.masks.count)
        return Step(torch.cat((tokens, masks)), torch.cat((torch.tensor(parents, device=self._device), behind)))

    def observe(self, beat: Beat) -> None:
        """There is nothing to adapt."""

    def _num_rows(self) -> int:
        """Rows of a whole step."""
        depth, named = self.masks.count, self.masks.named
        if self._shape == "straightforward":
            return 1 + 2 * depth
        candidates = sum(named**layer for layer in range(1, depth + 1)) if self._shape == "full" else depth * named
        return (1 + candidates) * (1 + depth)


def candidate_tree(root: int, forecast: Forecast, is_full: bool) -> tuple[list[int], list[int]]:
    """Token ids and parents of the last accepted token and the candidates below it, layer by layer.

    In the efficient tree (BiTA Figure 5) only the best candidate of a layer has children, in the full one every candidate has.
    """
    token_ids, parents = [root], [-1]
    layer = [0]
    for named in forecast:
        first = len(token_ids)
        for parent in layer if is_full else layer[:1]:
            token_ids += named
            parents += [parent] * len(named)
        layer = list(range(first, len(token_ids)))
    return token_ids, parents
