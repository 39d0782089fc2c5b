"""The draft model for the trees of several decode threads: one KV cache, one forward for rows of all trees.

Drafts need not be exact, so this class approximates where a stage may not: the last tokens of joined threads are never
computed, and accepted rows that were never drafted attend to the context as it is when they are computed. Shapes: N tree slots of
the cache, C accepted tokens that were never drafted, F rows to draft, R = C + F, P slots of the past behind the prompt.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.forest import Slots
from pipedec.forest.slots import UNSEEN
from pipedec.model import StageModel
from pipedec.threads import Sequence
from pipedec.tree import Advance, Candidates, PredictionTree, Visibility

_CHAINED = -1
RowsToDraft = tuple[int, PredictionTree, Tensor]  # thread number, its tree, int64 [F] rows


@dataclass(frozen=True)
class _ForwardRows:
    """The R rows of one forward: first accepted tokens that were never drafted (the *chains*), then the rows to draft.

    Attributes:
        token_ids: int64 [R].
        threads: int64 [R], thread numbers.
        rows: int64 [R], row of the thread's tree; _CHAINED for chains.
        positions: int64 [R], position ids.
        indices: int64 [R], index of an accepted token in its thread, UNSEEN for all other rows.
    """

    token_ids: Tensor
    threads: Tensor
    rows: Tensor
    positions: Tensor
    indices: Tensor


class DraftForest:
    """As ``DraftModel``, for several trees.

    Args:
        sequence: the answer's threads, read only. The caller passes accepted tokens to it before it calls ``advance``.
    """

    def __init__(self, model: StageModel, sequence: Sequence) -> None:
        self._model = model
        self._cache = model.make_cache()
        self._device = model.device
        self._sequence = sequence
        self._slots = Slots(sequence, self._device)
        self._threads = self._tensor([])  # int64 [N], the thread of each tree slot
        self._rows = self._tensor([])  # int64 [N], its row in the thread's tree
        self._positions = self._tensor([])  # int64 [N], its position id
        self._chains: dict[int, list[int]] = defaultdict(list)  # by thread: accepted tokens that were never drafted
        self._past_tokens: dict[int, int] = defaultdict(int)  # by thread: number of its tokens in the past

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        """Compute the next chunk of the prompt: int64 [any number]."""
        first = self._cache.past_length
        positions = torch.arange(first, first + len(token_ids), device=self._device)
        self._model.forward(token_ids, positions, self._cache, None, prompt_length)

    def expand(self, requested: list[RowsToDraft], children: int) -> list[Candidates]:
        """Draft rows of several trees in one forward.

        Args:
            requested: (thread, its tree, int64 rows of the tree). Rows are ascending and not drafted yet; their ancestors were
                drafted or are among them.
            children: number of most probable next tokens to return for each row.

        Returns:
            the candidates for each entry of ``requested``.
        """
        entering = self._forward_rows(requested)
        visibility = self._visibility(entering, requested)
        hidden = self._model.forward(entering.token_ids, entering.positions, self._cache, visibility)
        chained = self._keep(entering)
        log_probs_FV = self._model.logits(hidden[chained:]).log_softmax(-1)
        top = log_probs_FV.topk(min(children, log_probs_FV.shape[-1]))
        counts = [len(rows) for _, _, rows in requested]
        found = zip(requested, top.indices.split(counts), top.values.split(counts), strict=True)
        return [Candidates(rows, token_ids, log_probs) for (_, _, rows), token_ids, log_probs in found]

    def advance(self, number: int, advance: Advance) -> None:
        """Commit and prune cache entries as the thread's tree was."""
        own = torch.nonzero(self._threads == number)[:, 0]
        slots = torch.full((advance.num_rows,), -1, dtype=torch.int64, device=self._device)
        slots[self._rows[own]] = own
        committed = slots[advance.committed]
        is_drafted = committed >= 0
        is_kept, rows = advance.renumber(self._rows[own])
        self._rows[own[is_kept]] = rows
        stays = torch.ones_like(self._threads, dtype=torch.bool)
        stays[own] = is_kept
        drafted = committed[is_drafted]
        indices = self._past_tokens[number] + torch.arange(len(drafted), device=self._device)
        self._commit(torch.full_like(indices, number), indices, self._positions[drafted])
        self._cache.advance(drafted, torch.nonzero(stays)[:, 0])
        self._threads, self._rows, self._positions = self._threads[stays], self._rows[stays], self._positions[stays]
        self._chains[number] += advance.committed_ids[~is_drafted].tolist()

    def threads_changed(self) -> None:
        """To be called when threads were opened, joined or ended."""
        self._slots.threads_changed()
        for number in self._sequence.released():
            self._chains.pop(number, None)
        kept = self._slots.release()
        if kept is not None:
            self._cache.release(kept)

    def _forward_rows(self, requested: list[RowsToDraft]) -> _ForwardRows:
        chained = [
            (number, index, token)
            for number, chain in self._chains.items()
            for index, token in enumerate(chain, start=self._past_tokens[number])
        ]
        threads, indices, token_ids = (self._tensor([entry[part] for entry in chained]) for part in range(3))
        positions = self._tensor([self._sequence.threads[number].positions[index] for number, index, _ in chained])
        roots = {number: self._past_tokens[number] + len(self._chains[number]) for number, _, _ in requested}
        return _ForwardRows(
            torch.cat([token_ids, *(tree.token_ids[rows] for _, tree, rows in requested)]),
            torch.cat([threads, *(torch.full_like(rows, number) for number, _, rows in requested)]),
            torch.cat([torch.full_like(indices, _CHAINED), *(rows for _, _, rows in requested)]),
            torch.cat([positions, *(tree.positions[rows] for _, tree, rows in requested)]),
            torch.cat([indices, *(torch.where(rows == 0, roots[number], UNSEEN) for number, _, rows in requested)]),
        )

    def _visibility(self, entering: _ForwardRows, requested: list[RowsToDraft]) -> Visibility:
        """The attention mask of the rows of a forward."""
        threads, rows = torch.cat((self._threads, entering.threads)), torch.cat((self._rows, entering.rows))
        is_root = self._rows == 0
        indices = torch.full_like(self._threads, UNSEEN)
        indices[is_root] = self._tensor([self._past_tokens[number] for number in self._threads[is_root].tolist()])
        indices = torch.cat((indices, entering.indices))
        seen = self._slots.seen(entering.threads, threads, indices)
        seen_RN = seen[:, self._slots.past_length :]
        is_chained = entering.rows == _CHAINED
        is_later = (threads == entering.threads[:, None]) & (indices > entering.indices[:, None])
        seen_RN &= ~(is_chained[:, None] & is_later)
        first = int(is_chained.sum())
        for number, tree, of_tree in requested:
            own = torch.nonzero((threads == number) & (rows >= 0))[:, 0]
            seen_RN[first : first + len(of_tree), own] = tree.tree_mask[of_tree][:, rows[own]]
            first += len(of_tree)
        positions = torch.cat((self._slots.past_positions, self._positions, entering.positions))
        return Visibility(seen, self._sequence.prompt_length, lambda: positions)

    def _keep(self, entering: _ForwardRows) -> int:
        """Record the rows just computed; the chains are committed. Returns the number of tokens in the chains."""
        chained = int((entering.rows == _CHAINED).sum())
        first = len(self._threads)
        slots = torch.arange(first + len(entering.rows), device=self._device)
        self._commit(entering.threads[:chained], entering.indices[:chained], entering.positions[:chained])
        if chained:
            self._cache.advance(slots[first : first + chained], torch.cat((slots[:first], slots[first + chained :])))
        self._chains.clear()
        self._threads = torch.cat((self._threads, entering.threads[chained:]))
        self._rows = torch.cat((self._rows, entering.rows[chained:]))
        self._positions = torch.cat((self._positions, entering.positions[chained:]))
        return chained

    def _commit(self, threads: Tensor, indices: Tensor, positions: Tensor) -> None:
        self._slots.commit(threads, indices, positions)
        for number in threads.tolist():
            self._past_tokens[number] += 1

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
