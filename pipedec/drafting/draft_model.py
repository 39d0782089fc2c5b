"""The draft model S: a small model that predicts the tokens after rows of prediction trees, with its own two-level KV cache.

Owns the draft model's weights and cache, and knows which tree rows are in the cache. The decoding method decides which rows are
drafted and which candidates enter the pipeline. Shapes: N tree slots of the cache, C accepted tokens that were never drafted,
F rows to draft, R = C + F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.drafting.thread_labels import ThreadLabels
from pipedec.model import StageModel
from pipedec.threads import Sequence, single_thread
from pipedec.tree import Advance, Candidates, PredictionTree, RowsToDraft, Visibility


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
        self._slot_rows = torch.zeros(0, dtype=torch.int64, device=self._device)  # [N], the row of its tree in every tree slot
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
        rows = torch.cat([rows for _, _, rows in requested])
        log_probs_FV = self._model.logits(self._forward(requested, rows)).log_softmax(-1)
        top = log_probs_FV.topk(min(children, log_probs_FV.shape[-1]))
        counts = [len(rows) for _, _, rows in requested]
        found = zip(requested, top.indices.split(counts), top.values.split(counts), strict=True)
        return [Candidates(rows, token_ids, log_probs) for (_, _, rows), token_ids, log_probs in found]

    def advance(self, thread: int, advance: Advance) -> None:
        """Commit and prune cache entries as the thread's tree was."""
        own = self._slots_of(thread)
        rows = self._slot_rows[own]
        slots = torch.full((advance.num_rows,), -1, dtype=torch.int64, device=self._device)
        slots[rows] = own
        committed = slots[advance.committed]
        is_drafted = committed >= 0
        drafted, chain = committed[is_drafted], advance.committed_ids[~is_drafted]
        is_kept, new_rows = advance.renumber(rows)
        kept = own[is_kept]
        self._slot_rows[kept] = new_rows
        if self._labels is not None:
            kept = self._labels.advance(thread, drafted, own[~is_kept])
        self._slot_rows = self._slot_rows[kept]
        self._cache.advance(drafted, kept)
        if len(chain):
            self._chains[thread] = torch.cat((self._chains.get(thread, chain[:0]), chain))

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

    def _forward(self, requested: list[RowsToDraft], rows: Tensor) -> Tensor:
        """Compute first the chains, which join the past, then ``rows``, those of all trees. Returns hidden states of the latter.

        Returns:
            [F, E].
        """
        token_ids = torch.cat([*self._chains.values(), *(tree.token_ids[of_tree] for _, tree, of_tree in requested)])
        if self._labels is None:
            positions, visibility = self._visibility(*requested[0])
        else:
            positions, visibility = self._labels.enter(self._chains, requested, self._slot_rows)
        hidden = self._model.forward(token_ids, positions, self._cache, visibility)
        first, chained = len(self._slot_rows), len(token_ids) - len(rows)
        if chained:
            slots = torch.arange(first + len(token_ids), device=self._device)
            self._cache.advance(slots[first : first + chained], torch.cat((slots[:first], slots[first + chained :])))
        self._chains = {}
        self._slot_rows = torch.cat((self._slot_rows, rows))
        return hidden[chained:]

    def _visibility(self, number: int, tree: PredictionTree, rows: Tensor) -> tuple[Tensor, Visibility]:
        """Positions and attention mask of chain and ``rows`` for an answer that cannot fork."""
        chained = len(self._chains.get(number, ()))
        slot_rows = self._slot_rows
        positions = torch.cat((self._positions_after_past(chained), tree.positions[rows]))
        mask = tree.tree_mask[rows][:, torch.cat((slot_rows, rows))]
        if chained:  # no row below the chain has been drafted yet: there are no tree slots
            tree_mask, mask = mask, mask.new_ones((len(positions), len(positions))).tril()
            mask[chained:, chained:] = tree_mask
        return positions, Visibility(mask, self._cache.past_length, lambda: torch.cat((tree.positions[slot_rows], positions)))

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
