"""Which token of which thread each slot of a cache holds, and so which slots the rows of a thread see.

Slots are in the cache's order: those of the past first, the prompt's at their beginning, then those of the trees. Shapes: R rows,
P slots of the past, N of the trees, S = P + N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.threads import Sequence

UNSEEN = 2**40  # index of rows that are no certain tokens: only their own tree sees them


class Slots:
    """Labels of slots, and for each thread how many tokens of the others it sees."""

    def __init__(self, sequence: Sequence, device: torch.device | str) -> None:
        self._sequence = sequence
        self._device = device
        prompt = torch.arange(sequence.prompt_length, device=device)
        self._past = torch.stack((torch.zeros_like(prompt), torch.zeros_like(prompt), prompt))  # [3, P]: label, index, position
        self._limits: Tensor | None = None  # int64 [T, T + 1]

    @property
    def past_length(self) -> int:
        return self._past.shape[1]

    @property
    def shared(self) -> int:
        """How many slots, the first ones, every thread sees."""
        return self._sequence.prompt_length

    @property
    def past_positions(self) -> Tensor:
        """int64 [P]."""
        return self._past[2]

    def commit(self, threads: Tensor, indices: Tensor, positions: Tensor) -> None:
        """Rows become past, in this order: int64 [R], whose token each is, which of them, and where it stands."""
        self._past = torch.cat((self._past, torch.stack((threads + 1, indices, positions))), 1)

    def seen(self, threads_R: Tensor, tree_threads_N: Tensor, tree_indices_N: Tensor) -> Tensor:
        """bool [R, S]: the certain tokens that rows of these threads see."""
        labels_S = torch.cat((self._past[0], tree_threads_N + 1))
        indices_S = torch.cat((self._past[1], tree_indices_N))
        if self._limits is None:
            self._limits = self._seen_tokens()
        return indices_S < self._limits[threads_R][:, labels_S]

    def release(self) -> Tensor | None:
        """Forget what no later token may see: int64, the slots of the past that stay; None if all do."""
        needed = torch.tensor([1, *self._sequence.needed()], device=self._device)
        is_kept = self._past[1] < needed[self._past[0]]
        if bool(is_kept.all()):
            return None
        self._past = self._past[:, is_kept]
        return torch.nonzero(is_kept)[:, 0]

    def changed(self) -> None:
        """Threads were opened or joined others since the last call."""
        self._limits = None

    def _seen_tokens(self) -> Tensor:
        """For each thread, how many tokens it sees of the prompt (where 1 stands for all) and of each thread."""
        count = len(self._sequence.threads)
        table = []
        for number in range(count):
            limits = [1] + [0] * count
            for other, tokens in self._sequence.context(number):
                limits[other + 1] = max(limits[other + 1], tokens)
            limits[number + 1] = UNSEEN
            table.append(limits)
        return torch.tensor(table, device=self._device)
