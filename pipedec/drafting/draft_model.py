"""The draft model S: a small model that predicts the tokens after rows of prediction trees, with its own two-level KV cache.

Owns the draft model's weights and cache, and knows which tree rows are in the cache. The decoding method decides which rows are
drafted and which candidates enter the pipeline. Shapes: N tree slots of the cache, C accepted tokens that were never drafted,
F rows to draft, R = C + F.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.drafting.labels import ThreadLabels
from pipedec.model import StageModel
from pipedec.threads import Sequence, single_thread
from pipedec.tree import Advance, Candidates, PredictionTree, RowsToDraft, Sight


@dataclass(frozen=True)
class _Entering:
    """The R rows of one forward: first the chains, thread after thread, then the requested rows.

    Attributes:
        chains: int64 token ids by thread number.
        requested: see ``DraftModel.expand``.
        num_chained: C.
    """

    chains: dict[int, Tensor]
    requested: list[RowsToDraft]
    num_chained: int

    @property
    def rows(self) -> Tensor:
        """int64 [F], the requested rows, numbered by their own trees."""
        return torch.cat([rows for _, _, rows in self.requested])

    @property
    def token_ids(self) -> Tensor:
        """int64 [R]."""
        return torch.cat([*self.chains.values(), *(tree.token_ids[rows] for _, tree, rows in self.requested)])

    @property
    def positions(self) -> Tensor:
        """int64 [F], position ids of the requested rows."""
        return torch.cat([tree.positions[rows] for _, tree, rows in self.requested])


class DraftModel:
    """A whole model on one device. Rows of a tree may be drafted in any order, each after its ancestors.

    The tree slots of its cache are in order of drafting. Accepted rows that were never drafted form the *chain* of their thread,
    which the next ``expand`` computes together with its rows. If there are several threads, the last tokens of joined threads are
    never computed, and a chain attends to the context as it is when it is computed: drafts need not be exact.
    """

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._cache = model.make_cache()
        self._device = model.device
        self.begin(single_thread(0, (), 1))

    def begin(self, sequence: Sequence) -> None:
        """Forget the previous answer.

        Args:
            sequence: the threads of the next one, read only. The caller passes accepted tokens to it before it calls ``advance``.
        """
        self._cache.reset()
        self._sequence = sequence
        self._slot_rows = torch.zeros(0, dtype=torch.int64, device=self._device)  # int64 [N], row of its tree in every tree slot
        self._chains: dict[int, Tensor] = {}  # by thread: int64, token ids that follow the past
        self._labels = ThreadLabels(sequence, self._device) if sequence.can_fork else None

    def prefill(self, token_ids: Tensor) -> None:
        """Compute the next chunk of the prompt: int64 [any number]."""
        positions = self._positions_after_past(len(token_ids))
        self._model.forward(token_ids, positions, self._cache, prefill_length=self._sequence.prompt_length)

    def expand(self, requested: list[RowsToDraft], children: int) -> list[Candidates]:
        """Draft rows of several trees in one forward.

        Args:
            requested: (thread number, its tree, int64 rows of the tree).
            children: number of most probable next tokens to return for each row.

        Returns:
            the candidates for each entry of ``requested``.

        Raises:
            ValueError: rows of a tree are not ascending, one was drafted before, or an ancestor was not and is not among them.
        """
        for number, tree, rows in requested:
            self._check(tree, self._slot_rows[self._slots_of(number)], rows)
        entering = _Entering(self._chains, requested, sum(map(len, self._chains.values())))
        hidden = self._forward(entering)
        log_probs_FV = self._model.logits(hidden[entering.num_chained :]).log_softmax(-1)
        top = log_probs_FV.topk(min(children, log_probs_FV.shape[-1]))
        counts = [len(rows) for _, _, rows in requested]
        found = zip(requested, top.indices.split(counts), top.values.split(counts), strict=True)
        return [Candidates(rows, token_ids, log_probs) for (_, _, rows), token_ids, log_probs in found]

    def advance(self, thread: int, advance: Advance) -> None:
        """Commit and prune cache entries as the thread's tree was."""
        own = self._slots_of(thread)
        slots = torch.full((advance.num_rows,), -1, dtype=torch.int64, device=self._device)
        slots[self._slot_rows[own]] = own
        committed = slots[advance.committed]
        is_drafted = committed >= 0
        is_kept, rows = advance.renumber(self._slot_rows[own])
        if self._labels is not None:
            self._slot_rows[own[is_kept]] = rows
            kept = self._labels.advance(thread, committed[is_drafted], own[is_kept])
            self._slot_rows = self._slot_rows[kept]
        else:
            kept, self._slot_rows = own[is_kept], rows
        self._cache.advance(committed[is_drafted], kept)
        chain = advance.committed_ids[~is_drafted]
        if len(chain):
            self._chains[thread] = torch.cat((self._chains[thread], chain)) if thread in self._chains else chain

    def threads_changed(self) -> None:
        """To be called when threads were opened, joined or ended."""
        if self._labels is None:
            return
        for number in self._sequence.released():
            self._chains.pop(number, None)
        kept = self._labels.threads_changed()
        if kept is not None:
            self._cache.release(kept)

    def _positions_after_past(self, num_rows: int) -> Tensor:
        """int64 [num_rows], the position ids directly after the past."""
        first = self._cache.past_length
        return torch.arange(first, first + num_rows, device=self._device)

    def _slots_of(self, number: int) -> Tensor:
        """int64, ascending, the tree slots that hold rows of a thread's tree."""
        return torch.arange(len(self._slot_rows), device=self._device) if self._labels is None else self._labels.slots_of(number)

    def _forward(self, entering: _Entering) -> Tensor:
        """Compute the rows; the chains are committed. Returns hidden states: [R, E]."""
        chained, rows, positions = entering.num_chained, entering.rows, entering.positions
        if self._labels is None:
            mask = self._mask(entering)
            positions = torch.cat((self._positions_after_past(chained), positions))
            hidden = self._model.forward(entering.token_ids, positions, self._cache, mask_RN=mask)
        else:
            self._labels.enter(self._chains, entering.requested, positions)
            sight = self._labels.sight(chained, entering.requested, torch.cat((self._slot_rows, rows)))
            hidden = self._model.forward(entering.token_ids, self._labels.positions[-len(rows) - chained :], self._cache, sight=sight)
            self._labels.commit_chains(chained, len(rows))
        first = len(self._slot_rows)
        if chained:
            slots = torch.arange(first + chained + len(rows), device=self._device)
            self._cache.advance(slots[first : first + chained], torch.cat((slots[:first], slots[first + chained :])))
        self._chains = {}
        self._slot_rows = torch.cat((self._slot_rows, rows))
        return hidden

    def _mask(self, entering: _Entering) -> Tensor:
        """bool [R, N + R], for one thread. No row below the chain has been drafted yet, so C or N is 0."""
        ((_, tree, rows),) = entering.requested
        tree_mask = tree.tree_mask[rows][:, torch.cat((self._slot_rows, rows))]
        chained = entering.num_chained
        if not chained:
            return tree_mask
        mask = tree_mask.new_ones((chained + len(rows), chained + len(rows))).tril()
        mask[chained:, chained:] = tree_mask
        return mask

    def _check(self, tree: PredictionTree, drafted: Tensor, rows: Tensor) -> None:
        if bool((rows.diff() <= 0).any()):
            raise ValueError("rows to draft must be in ascending order")
        is_drafted = torch.zeros(tree.num_rows, dtype=torch.bool, device=self._device)
        is_drafted[drafted] = True
        if bool(is_drafted[rows].any()):
            raise ValueError("rows must not be drafted twice")
        is_drafted[rows] = True
        if bool((tree.tree_mask[rows] & ~is_drafted).any()):
            raise ValueError("rows must be drafted after their ancestors")
