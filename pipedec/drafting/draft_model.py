"""The draft model S: a small model that says what may follow rows of the tree, with its own two-level cache.

Owns the draft's weights and cache, and knows which tree rows are in it. Which rows are drafted, and which candidates enter the
pipeline, the decoding method decides. Shapes: N rows in the tree, S of them in the cache, F rows drafted now behind a chain of
C accepted ones, c children.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.drafting.draft_forest import DraftForest
from pipedec.model import StageModel
from pipedec.threads import Sequence
from pipedec.tree import Advance, Candidates, PredictionTree


class DraftModel:
    """A whole model on one device that drafts tree rows in any order in which ancestors come first.

    The tree slots of its cache are in order of drafting. Accepted rows that were never drafted wait as a *chain*: the next
    ``expand`` computes them in front of its rows.
    """

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._cache = model.make_cache()
        self._device = model.device
        self._nothing = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._slot_rows = self._nothing  # int64 [S], the tree row of every tree slot
        self._chain_ids = self._nothing  # int64 [C], token ids behind the past

    def for_threads(self, sequence: Sequence) -> DraftForest:
        """The same model on the trees of an answer's threads. ``sequence`` is replayed by its owner."""
        return DraftForest(self._model, sequence)

    def begin(self) -> None:
        """Forget the last request."""
        self._cache.reset()
        self._slot_rows = self._chain_ids = self._nothing

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        """Take in the next chunk of the prompt: int64 [R]."""
        self._model.forward(token_ids, self._behind_past(len(token_ids)), self._cache, mask_RN=None, prefill_length=prompt_length)

    def expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        """Draft ``rows`` in one forward and return the likeliest ``children`` of each.

        Args:
            rows: int64 [F], ascending rows of the tree.

        Raises:
            ValueError: a row was drafted before, or has an ancestor that neither was nor is among ``rows``.
        """
        self._check(tree, rows)
        chain = len(self._chain_ids)
        hidden = self._model.forward(
            torch.cat((self._chain_ids, tree.token_ids[rows])),
            torch.cat((self._behind_past(chain), tree.positions[rows])),
            self._cache,
            mask_RN=self._mask(tree, rows),
        )
        if chain:
            new_slots = torch.arange(chain + len(rows))
            self._cache.advance(new_slots[:chain], new_slots[chain:])
        self._chain_ids = self._nothing
        self._slot_rows = torch.cat((self._slot_rows, rows))
        log_probs_FV = self._model.logits(hidden[chain:]).log_softmax(-1)
        top = log_probs_FV.topk(min(children, log_probs_FV.shape[-1]))
        return Candidates(rows=rows, token_ids=top.indices, log_probs=top.values)

    def advance(self, advance: Advance) -> None:
        """Commit and prune the cache as the tree did."""
        slots_N = torch.full((advance.num_rows,), -1, dtype=torch.int64, device=self._device)
        slots_N[self._slot_rows] = torch.arange(len(self._slot_rows), device=self._device)
        committed = slots_N[advance.committed]
        is_drafted = committed >= 0
        is_kept, self._slot_rows = advance.renumber(self._slot_rows)
        self._cache.advance(committed[is_drafted], torch.nonzero(is_kept)[:, 0])
        self._chain_ids = torch.cat((self._chain_ids, advance.committed_ids[~is_drafted]))

    def _behind_past(self, num_rows: int) -> Tensor:
        """Position ids of rows that follow the past directly."""
        first = self._cache.past_length
        return torch.arange(first, first + num_rows, device=self._device)

    def _mask(self, tree: PredictionTree, rows: Tensor) -> Tensor:
        """bool [C + F, S + C + F]. Nothing below a chain has been drafted yet, so there is either a chain or slots."""
        sees = tree.tree_mask[rows][:, torch.cat((self._slot_rows, rows))]
        chain = len(self._chain_ids)
        if not chain:
            return sees
        mask = sees.new_ones((chain + len(rows), chain + len(rows))).tril()
        mask[chain:, chain:] = sees
        return mask

    def _check(self, tree: PredictionTree, rows: Tensor) -> None:
        if bool((rows.diff() <= 0).any()):
            raise ValueError("rows to draft must be in ascending order")
        is_drafted = torch.zeros(tree.num_rows, dtype=torch.bool, device=self._device)
        is_drafted[self._slot_rows] = True
        if bool(is_drafted[rows].any()):
            raise ValueError("a row is drafted once: one of these was drafted before")
        is_drafted[rows] = True
        if bool((tree.tree_mask[rows] & ~is_drafted).any()):
            raise ValueError("a row is drafted after its ancestors: one of these has an undrafted one")
