"""The draft model S: a small model that predicts the tokens after rows of the tree, with its own two-level KV cache.

Owns the draft model's weights and cache, and knows which tree rows are in the cache. The decoding method decides which rows are
drafted and which candidates enter the pipeline. Shapes: N rows in the tree, S of them in the cache, F rows to draft, C accepted
tokens computed before them, c children per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.drafting.draft_forest import DraftForest
from pipedec.model import StageModel
from pipedec.threads import Sequence
from pipedec.tree import Advance, Candidates, PredictionTree, Visibility


class DraftModel:
    """A whole model on one device. Rows of the tree may be drafted in any order, each after its ancestors.

    The tree slots of its cache are in order of drafting. Accepted rows that were never drafted form the *chain*, which the next
    ``expand`` computes together with its rows.
    """

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._cache = model.make_cache()
        self._device = model.device
        self._empty = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._slot_rows = self._empty  # int64 [S], the tree row of every tree slot
        self._chain_ids = self._empty  # int64 [C], token ids that follow the past

    def for_threads(self, sequence: Sequence) -> DraftForest:
        """The same model for the trees of an answer's threads.

        Args:
            sequence: the answer's threads, read only; the caller passes accepted tokens to it.
        """
        return DraftForest(self._model, sequence)

    def begin(self) -> None:
        """Forget the previous request."""
        self._cache.reset()
        self._slot_rows = self._chain_ids = self._empty

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        """Compute the next chunk of the prompt: int64 [any number]."""
        positions = self._positions_after_past(len(token_ids))
        self._model.forward(token_ids, positions, self._cache, None, prompt_length)

    def expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        """Draft ``rows`` in one forward.

        Args:
            rows: int64 [F], rows of the tree, ascending.
            children: c, number of most probable next tokens to return for each row.

        Raises:
            ValueError: a row was drafted before, or an ancestor was not and is not among ``rows``.
        """
        self._check(tree, rows)
        chain = len(self._chain_ids)
        token_ids = torch.cat((self._chain_ids, tree.token_ids[rows]))
        positions = torch.cat((self._positions_after_past(chain), tree.positions[rows]))
        visibility = self._visibility(tree, rows, positions)
        hidden = self._model.forward(token_ids, positions, self._cache, visibility)
        if chain:
            new_slots = torch.arange(chain + len(rows))
            self._cache.advance(new_slots[:chain], new_slots[chain:])
        self._chain_ids = self._empty
        self._slot_rows = torch.cat((self._slot_rows, rows))
        log_probs_FV = self._model.logits(hidden[chain:]).log_softmax(-1)
        top = log_probs_FV.topk(min(children, log_probs_FV.shape[-1]))
        return Candidates(rows=rows, token_ids=top.indices, log_probs=top.values)

    def advance(self, advance: Advance) -> None:
        """Commit and prune cache entries as the tree was."""
        slots_N = torch.full((advance.num_rows,), -1, dtype=torch.int64, device=self._device)
        slots_N[self._slot_rows] = torch.arange(len(self._slot_rows), device=self._device)
        committed = slots_N[advance.committed]
        is_drafted = committed >= 0
        is_kept, self._slot_rows = advance.renumber(self._slot_rows)
        self._cache.advance(committed[is_drafted], torch.nonzero(is_kept)[:, 0])
        self._chain_ids = torch.cat((self._chain_ids, advance.committed_ids[~is_drafted]))

    def _positions_after_past(self, num_rows: int) -> Tensor:
        """int64 [num_rows], the position ids directly after the past."""
        first = self._cache.past_length
        return torch.arange(first, first + num_rows, device=self._device)

    def _visibility(self, tree: PredictionTree, rows: Tensor, positions: Tensor) -> Visibility:
        """The attention mask of the chain and of ``rows``, over S + C + F slots."""
        slot_rows = self._slot_rows
        mask, past_length = self._mask(tree, rows), self._cache.past_length
        return Visibility(mask, past_length, lambda: torch.cat((tree.positions[slot_rows], positions)))

    def _mask(self, tree: PredictionTree, rows: Tensor) -> Tensor:
        """bool [C + F, S + C + F]. No row below the chain has been drafted yet, so C or S is 0."""
        tree_mask = tree.tree_mask[rows][:, torch.cat((self._slot_rows, rows))]
        chain = len(self._chain_ids)
        if not chain:
            return tree_mask
        mask = tree_mask.new_ones((chain + len(rows), chain + len(rows))).tril()
        mask[chain:, chain:] = tree_mask
        return mask

    def _check(self, tree: PredictionTree, rows: Tensor) -> None:
        if bool((rows.diff() <= 0).any()):
            raise ValueError("rows to draft must be in ascending order")
        is_drafted = torch.zeros(tree.num_rows, dtype=torch.bool, device=self._device)
        is_drafted[self._slot_rows] = True
        if bool(is_drafted[rows].any()):
            raise ValueError("rows must not be drafted twice")
        is_drafted[rows] = True
        if bool((tree.tree_mask[rows] & ~is_drafted).any()):
            raise ValueError("rows must be drafted after their ancestors")
