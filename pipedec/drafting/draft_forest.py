"""The draft model on the trees of several decode threads: one cache, one forward for rows of all of them.

A draft need not be right, so it forgives what a stage may not: it never sees the last tokens of threads that it joins, and
accepted rows that it never drafted see their context as it is now. Shapes: N tree slots of the cache, C accepted rows that were
never drafted, F rows drafted now, R = C + F, P slots of the past, S = P + N + R.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.forest import Slots
from pipedec.forest.slots import UNSEEN
from pipedec.model import StageModel
from pipedec.threads import Sequence
from pipedec.tree import Advance, Candidates, PredictionTree, Sight

_CHAINED = -1
Ask = tuple[int, PredictionTree, Tensor]


@dataclass(frozen=True)
class _Entering:
    """The rows of one forward: accepted ones that were never drafted (their ``rows`` are _CHAINED), then those asked for.

    ``labels`` say which token of its thread a certain row is, UNSEEN for the others.
    """

    token_ids: Tensor
    threads: Tensor
    rows: Tensor
    positions: Tensor
    labels: Tensor


class DraftForest:
    """What ``DraftModel`` does for one tree. ``sequence`` is replayed by its owner, before this class is told."""

    def __init__(self, model: StageModel, sequence: Sequence) -> None:
        self._model = model
        self._cache = model.make_cache()
        self._device = model.device
        self._sequence = sequence
        self._slots = Slots(sequence, self._device)
        self._threads = self._tensor([])  # [N], whose tree a slot's row is in
        self._rows = self._tensor([])  # [N], which row of it
        self._positions = self._tensor([])  # [N]
        self._chains: dict[int, list[int]] = defaultdict(list)  # accepted tokens of each thread that were never drafted
        self._past_tokens: dict[int, int] = defaultdict(int)  # of each thread, how many are in the past

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        """Take in the next chunk of the prompt: int64 [R]."""
        first = self._cache.past_length
        positions = torch.arange(first, first + len(token_ids), device=self._device)
        self._model.forward(token_ids, positions, self._cache, mask_RN=None, prefill_length=prompt_length)

    def expand(self, asks: Rows[Ask], children: int) -> list[Candidates]:
        """Draft rows of several trees in one forward.

        Args:
            asks: thread, its tree, and int64 [F] ascending rows of it, never drafted, whose ancestors were or are among them.

        Returns:
            for each of them the likeliest ``children`` of its rows.
        """
        entering = self._entering(asks)
        sight = self._sight(entering, asks)
        hidden = self._model.forward(entering.token_ids, entering.positions, self._cache, sight=sight)
        chained = self._keep(entering)
        log_probs_FV = self._model.logits(hidden[chained:]).log_softmax(-1)
        top = log_probs_FV.topk(min(children, log_probs_FV.shape[-1]))
        counts = [len(rows) for _, _, rows in asks]
        found = zip(asks, top.indices.split(counts), top.values.split(counts), strict=True)
        return [Candidates(rows, token_ids, log_probs) for (_, _, rows), token_ids, log_probs in found]

    def advance(self, number: int, advance: Advance) -> None:
        """Commit and prune a thread's rows as its tree did."""
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
        """Threads were opened, joined or ended."""
        self._slots.threads_changed()
        for number in self._sequence.released():
            self._chains.pop(number, None)
        kept = self._slots.release()
        if kept is not None:
            self._cache.release(kept)

    def _entering(self, asks: Rows[Ask]) -> _Entering:
        chained = [
            (number, self._past_tokens[number] + place, token)
            for number, chain in self._chains.items()
            for place, token in enumerate(chain)
        ]
        threads, indices, token_ids = (self._tensor([entry[part] for entry in chained]) for part in range(3))
        positions = self._tensor([self._sequence.threads[number].positions[index] for number, index, _ in chained])
        roots = {number: self._past_tokens[number] + len(self._chains[number]) for number, _, _ in asks}
        return _Entering(
            torch.cat([token_ids, *(tree.token_ids[rows] for _, tree, rows in asks)]),
            torch.cat([threads, *(torch.full_like(rows, number) for number, _, rows in asks)]),
            torch.cat([torch.full_like(indices, _CHAINED), *(rows for _, _, rows in asks)]),
            torch.cat([positions, *(tree.positions[rows] for _, tree, rows in asks)]),
            torch.cat([indices, *(torch.where(rows == 0, roots[number], UNSEEN) for number, _, rows in asks)]),
        )

    def _sight(self, entering: _Entering, asks: Rows[Ask]) -> Sight:
        threads, rows = torch.cat((self._threads, entering.threads)), torch.cat((self._rows, entering.rows))
        is_root = self._rows == 0
        labels = torch.full_like(self._threads, UNSEEN)
        labels[is_root] = self._tensor([self._past_tokens[number] for number in self._threads[is_root].tolist()])
        labels = torch.cat((labels, entering.labels))
        seen_RS = self._slots.seen(entering.threads, threads, labels)
        seen_RN = seen_RS[:, self._slots.past_length :]
        is_chained = entering.rows == _CHAINED
        is_later = (threads == entering.threads[:, None]) & (labels > entering.labels[:, None])
        seen_RN &= ~(is_chained[:, None] & is_later)
        first = int(is_chained.sum())
        for number, tree, of_tree in asks:
            own = torch.nonzero((threads == number) & (rows >= 0))[:, 0]
            seen_RN[first : first + len(of_tree), own] = tree.tree_mask[of_tree][:, rows[own]]
            first += len(of_tree)
        positions = torch.cat((self._slots.past_positions, self._positions, entering.positions))
        return Sight(seen_RS, positions, self._slots.shared)

    def _keep(self, entering: _Entering) -> int:
        """Count in what was just computed: accepted rows become past. Returns how many of these there were."""
        chained = int((entering.rows == _CHAINED).sum())
        first = len(self._threads)
        slots = torch.arange(first + len(entering.rows), device=self._device)
        self._commit(entering.threads[:chained], entering.labels[:chained], entering.positions[:chained])
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
