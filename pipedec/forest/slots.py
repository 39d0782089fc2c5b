"""Labels for the slots of a KV cache: which thread's token each slot holds, and so which threads attend to it.

Slots are in cache order: first the past, beginning with the prompt, then the rows of all trees. All threads attend to the whole
prompt, so its slots have no labels. A token is *certain* when it is accepted or forced. Shapes: R rows, P slots of the past
after the prompt, N slots of the trees, T threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.threads import Sequence

UNSEEN = 2**40  # token index of rows that are not certain: only rows of their own tree attend to them


class Slots:
    """The labels of all slots of the past, and how many tokens of every other thread each thread attends to; on the host."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._past = torch.zeros(3, 0, dtype=torch.int64)  # [3, P]: thread, token index, position id
        self._limits: Tensor | None = None  # [T, T], see ``_visible_tokens``; None = outdated

    @property
    def past_length(self) -> int:
        """P."""
        return self._past.shape[1]

    @property
    def past_positions(self) -> Tensor:
        """int64 [P], position ids."""
        return self._past[2]

    def commit(self, threads: Tensor, indices: Tensor, positions: Tensor) -> None:
        """Append R rows to the past.

        Args:
            threads: int64 [R], the thread of each token.
            indices: int64 [R], the token's index in its thread.
            positions: int64 [R], its position id.
        """
        self._past = torch.cat((self._past, torch.stack((threads, indices, positions))), 1)

    def seen(self, threads_R: Tensor, tree_threads_N: Tensor, tree_indices_N: Tensor) -> Tensor:
        """The certain tokens after the prompt that rows attend to.

        Args:
            threads_R: int64, the thread of each row.
            tree_threads_N: int64, the thread of each tree slot.
            tree_indices_N: int64, the token index of each tree slot, UNSEEN if its token is not certain.

        Returns:
            bool [R, P + N].
        """
        labels = torch.cat((self._past[0], tree_threads_N))
        indices = torch.cat((self._past[1], tree_indices_N))
        if self._limits is None:
            self._limits = self._visible_tokens()
        return indices < self._limits[threads_R][:, labels]

    def release(self) -> Tensor | None:
        """Forget tokens that no later token attends to.

        Returns:
            int64, the slots of the past that remain, the prompt's among them; None if all do.
        """
        needed = torch.tensor(self._sequence.needed())
        is_kept = self._past[1] < needed[self._past[0]]
        if bool(is_kept.all()):
            return None
        self._past = self._past[:, is_kept]
        prompt_length = self._sequence.prompt_length
        prompt = torch.arange(prompt_length)
        return torch.cat((prompt, torch.nonzero(is_kept)[:, 0] + prompt_length))

    def threads_changed(self) -> None:
        """Call this when threads were opened or have joined others."""
        self._limits = None

    def _visible_tokens(self) -> Tensor:
        """int64 [T, T], the number of tokens of each other thread that a thread attends to."""
        table = [[0] * len(self._sequence.threads) for _ in self._sequence.threads]
        for number, limits in enumerate(table):
            for other, tokens in self._sequence.context(number):
                limits[other] = max(limits[other], tokens)
            limits[number] = UNSEEN
        return torch.tensor(table)
