"""BiTA (``bita``): the target drafts for itself, with mask rows and a learned prompt. No draft model is needed.

A step is a tree: the last accepted token, candidates for the tokens after it, and groups of masks below some of these rows. One
pass through all stages verifies the candidates and forecasts the next ones (BiTA §3.2, Algorithm 1): the verdict contains the
accepted tokens and the masks' predictions for the positions after them. Only accepted rows outlive a verdict, so this class keeps
no tree and runs no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import MaskParams, Request, Step, UserError, Verdict
from pipedec.decoding.candidates import CandidateTree, Forecast, RankChances, efficient, full, likeliest, straightforward
from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.experience import Experience
from pipedec.tree import mask_groups

DEFAULT_NAMED = {"likeliest": 16, "efficient": 5, "full": 2}  # tokens of each mask; efficient: BiTA §4.1
DEFAULT_ROWS = 64  # of a likeliest tree: what most GPUs compute as fast as one (see ``hardware``)
MAX_NAMED = 64  # of all masks together: a verdict has to fit into a message's header
MAX_ROWS = 4096


class Bita:
    """One tree per passage of the pipeline, as ``request.tree`` shapes it.

    Args:
        trained_masks: masks that the target's BiTA was trained with; 0 if it has none.

    Raises:
        UserError: there is no BiTA, or it has fewer masks than the request's depth, or the tree is too large.
    """

    def __init__(self, request: Request, trained_masks: int, experience: Experience, device: torch.device | str = "cpu") -> None:
        if not trained_masks:
            raise UserError("method bita needs what pipedec train bita has learned for this target: give --bita DIR")
        limits = request.tree
        depth = limits.depth or trained_masks
        if depth > trained_masks:
            raise UserError(f"tree depth {depth}, but this BiTA was trained with {trained_masks} masks: lower --depth")
        is_chain = limits.shape == "straightforward"
        named = 1 if is_chain else limits.children or min(DEFAULT_NAMED[limits.shape], MAX_NAMED // depth)
        if depth * named > MAX_NAMED:
            raise UserError(f"{depth} masks that name {named} tokens each are more than {MAX_NAMED}: lower --depth or --children")
        num_rows = (1 + depth) * sum(named**layer for layer in range(depth + 1))
        if limits.shape == "full" and num_rows > MAX_ROWS:
            raise UserError(f"a tree of {num_rows} rows is more than {MAX_ROWS}: lower --depth or --children")
        self.masks = MaskParams(depth, named)
        self.hits = 0
        self.misses = 0
        self._shape = limits.shape
        self._rows = limits.rows or DEFAULT_ROWS
        self.room = MAX_ROWS  # rows that may enter, if others need some of them
        self.tree = None
        self._chances: RankChances = experience.rank_chances(request, self.masks)
        self._device = device
        self._root: int | None = None
        self._forecast: Forecast = ()

    def prefill(self, token_ids: Tensor) -> None:
        """Nothing to do: there is no draft model."""

    def draft(self) -> None:
        """Nothing to do: the stages compute the forecast."""

    def apply(self, verdict: Verdict) -> None:
        self._chances.observe(self._forecast, verdict.tokens)
        self._root = verdict.tokens[-1] if verdict.finished is None else None
        self._forecast = verdict.forecast
        self.hits += len(verdict.tokens) - 1
        self.misses += verdict.finished is None

    def cut(self) -> None:
        """Drop root and forecast; nothing else outlives a verdict."""
        self._root, self._forecast = None, ()

    def plant(self, token: int) -> None:
        """Start again from a certain token."""
        self._root, self._forecast = token, ()

    def propose(self) -> Step | None:
        """The root, the candidates, then the masks."""
        if self._root is None:
            return None
        tree = self._tree(self._root)
        self._root = None
        tokens, parents, with_masks = (
            torch.tensor(rows, dtype=torch.int64, device=self._device) for rows in (tree.token_ids, tree.parents, tree.with_masks)
        )
        masks, mask_parents = mask_groups(with_masks, len(tokens), self.masks.count)
        return Step(torch.cat((tokens, masks)), torch.cat((parents, mask_parents)))

    def observe(self, timing: TimestepTiming) -> None:
        """Nothing to adapt."""

    def _tree(self, root: int) -> CandidateTree:
        """The root and its candidates; the root alone if there is no room for masks."""
        if self.room <= self.masks.count:
            return CandidateTree([root])
        shapes = {"efficient": efficient, "straightforward": straightforward, "full": full}
        if self._shape in shapes:
            tree = shapes[self._shape](root, self._forecast)
            if len(tree.token_ids) + self.masks.count * len(tree.with_masks) <= self.room:
                return tree
        return likeliest(root, self._forecast, self._chances, min(self._rows, self.room), self.masks.count)
