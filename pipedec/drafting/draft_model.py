"""The draft model S: a small model that says what may follow each row of the tree, with its own two-level cache.

Owns the draft's weights and cache. Which rows are drafted, and which candidates enter the pipeline, the decoding method
decides. Shapes: R rows drafted, N rows in the tree, c children.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.model import StageModel
from pipedec.tree import Advance, Candidates, PredictionTree


class DraftModel:
    """A whole model on one device that drafts tree rows in order of entry."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._cache = model.make_cache()

    def begin(self) -> None:
        """Forget the last request."""
        self._cache.reset()

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        """Take in the next chunk of the prompt: int64 [R]."""
        first = self._cache.past_length
        positions = torch.arange(first, first + len(token_ids), device=token_ids.device)
        self._model.forward(token_ids, positions, self._cache, mask_RN=None, prefill_length=prompt_length)

    def expand(self, tree: PredictionTree, children: int) -> Candidates:
        """Draft every tree row that has not been drafted yet and return the likeliest ``children`` of each."""
        drafted = self._cache.tree_length
        hidden_RE = self._model.forward(
            tree.token_ids[drafted:], tree.positions[drafted:], self._cache, mask_RN=tree.tree_mask[drafted:]
        )
        log_probs_RV = self._model.logits(hidden_RE).log_softmax(-1)
        top = log_probs_RV.topk(min(children, log_probs_RV.shape[-1]))
        rows = torch.arange(drafted, tree.num_rows, device=top.indices.device)
        return Candidates(rows=rows, token_ids=top.indices, log_probs=top.values)

    def advance(self, advance: Advance) -> None:
        """Commit and prune the cache as the tree did."""
        self._cache.advance(advance.committed, advance.kept)
