"""Sampling and verification of an answer in several decode threads, each with its own walk, banned tokens and noise.

Knows the computed rows and the tokens allowed after them; knows no model and no cache. Further rows may arrive between a verdict
and its replay, so a verifier has a ``Sequence`` of its own, which is ahead of the forest's.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from pipedec.core import Part, SamplingParams
from pipedec.forest import Forest, ThreadChanges, paths
from pipedec.sampling import Sampler, greedy
from pipedec.threads import Sequence, State
from pipedec.tree import PredictionTree


class ThreadVerifier:
    """Chooses the token after each row, and accepts tokens in every thread as deep as there are rows.

    Args:
        sequence: a new one; nothing else passes tokens to it.

    Attributes:
        verified_rows: rows whose successors the last verdict accepted, one per token, thread after thread.
    """

    def __init__(self, sequence: Sequence, sampling: SamplingParams, vocab_size: int, device: torch.device | str) -> None:
        self._sequence = sequence
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._device = device
        self._prompt: list[Tensor] = []  # chunks of the prompt, kept only for penalties
        self._samplers: dict[int, Sampler | None] = {}
        self._ahead: dict[int, list[int]] = defaultdict(list)  # by thread: accepted tokens not replayed yet
        self._stopped: set[int] = set()  # threads whose last such token joins or ends: they continue after its replay
        self.verified_rows: list[int] = []

    @property
    def finished(self) -> str | None:
        return self._sequence.finished

    def add_prompt(self, token_ids: Tensor) -> None:
        """Add a chunk of the prompt: int64 [any number]."""
        if self._sampling.has_penalties:
            self._prompt.append(token_ids)

    def first(self, logits_1V: Tensor) -> Tensor:
        """The first token of the answer, int64 [1], from the logits of the prompt's last token."""
        first, banned = self._sequence.following(0, [])
        position = torch.tensor([first], device=self._device)
        tree = PredictionTree(self._device)
        logits_1V = logits_1V.clone()
        logits_1V[:, list(banned)] = -torch.inf
        token = self._choose_in_thread(0, self._sequence, logits_1V, position, tree, slice(0, 0))
        self._accept(0, int(token[0]))
        return token

    def choose(self, logits_RV: Tensor, forest: Forest, rows: Tensor) -> Tensor:
        """The token after each of ``rows``, the rows of the newest step without its masks: int64 [R]."""
        logits_RV = logits_RV.clone()
        chosen = torch.zeros_like(rows)
        threads = forest.threads[rows]
        for number in threads.unique().tolist():
            of_step = torch.nonzero(threads == number)[:, 0]
            own = torch.searchsorted(forest.rows_of(number), rows[of_step])
            positions = self._apply_bans(logits_RV, of_step, forest, number, own)
            tree, logits = forest.trees[number], logits_RV[of_step]
            chosen[of_step] = self._choose_in_thread(number, forest.sequence, logits, positions, tree, own)
        return chosen

    def _apply_bans(self, logits_RV: Tensor, of_step: Tensor, forest: Forest, number: int, own: Tensor) -> Tensor:
        """Set the logits of banned tokens to −inf, in place.

        Args:
            of_step: int64, indices into ``logits_RV`` of a thread's rows.
            own: int64, the same rows as indices into the thread's tree.

        Returns:
            int64, position ids of the tokens after these rows.
        """
        positions = []
        for index, path in zip(of_step.tolist(), paths(forest.trees[number], own.tolist()), strict=True):
            position, banned = forest.sequence.following(number, path)
            positions.append(position)
            logits_RV[index, list(banned)] = -torch.inf
        return torch.tensor(positions, device=self._device)

    def _choose_in_thread(
        self, number: int, sequence: Sequence, logits: Tensor, positions: Tensor, tree: PredictionTree, rows: Tensor | slice
    ) -> Tensor:
        if number not in self._samplers:
            self._samplers[number] = self._make_sampler(number, sequence)
        sampler = self._samplers[number]
        if sampler is None:
            return greedy(logits)
        mask_RN = tree.tree_mask[rows] if tree.num_rows else torch.zeros(len(logits), 0, dtype=torch.bool, device=self._device)
        return sampler.choose(logits, positions, mask_RN, tree.token_ids.clamp(min=0))

    def scores(self, logits_RV: Tensor, threads_R: Tensor, positions_R: Tensor) -> Tensor:
        """Scores that rank the predictions of mask rows: [R, V] (see ``Sampler.scores``).

        Args:
            threads_R: int64, the thread of each mask.
            positions_R: int64, position ids of the predicted tokens.
        """
        scores_RV = logits_RV.double()
        for number in threads_R.unique().tolist():
            sampler, own = self._samplers.get(number), threads_R == number
            if sampler is not None:
                scores_RV[own] = sampler.scores(logits_RV[own], positions_R[own])
        return scores_RV

    def verify(self, forest: Forest, successors_N: Tensor) -> list[Part]:
        """In every thread, walk down from its last accepted token along the target's tokens, as deep as there are rows.

        Args:
            forest: the last stage's forest; all its rows are computed.
            successors_N: int64 [N], the target's token after each row.

        Returns:
            the accepted tokens of each thread that has any.
        """
        parts = []
        self.verified_rows = []
        successors = successors_N.tolist()
        for number in list(forest.trees):
            rows = self._walk(forest, number, successors)
            if rows:
                parts.append(Part(number, tuple(successors[row] for row in rows)))
                self.verified_rows += rows
        return parts

    def _walk(self, forest: Forest, number: int, successors: list[int]) -> list[int]:
        """Accept tokens of one thread, until one joins or ends it; returns the rows whose successors they are."""
        tree = forest.trees[number]
        row = self._last_accepted(tree, number)
        own = forest.rows_of(number).tolist()
        rows: list[int] = []
        while row is not None and self._sequence.threads[number].state is State.RUNNING:
            token = successors[own[row]]
            rows.append(own[row])
            self._accept(number, token)
            row = None if number in self._stopped else tree.child(row, token)
        return rows

    def _last_accepted(self, tree: PredictionTree, number: int) -> int | None:
        """The row of the thread's last accepted token; None if it has not entered or the thread waits for a replay."""
        row = 0 if tree.num_rows and number not in self._stopped else None
        for token in self._ahead[number]:
            row = None if row is None else tree.child(row, token)
        return row

    def _accept(self, number: int, token: int) -> None:
        if self._sequence.ends_walk(number, token):
            self._stopped.add(number)
        self._sequence.accept(number, token)
        self._ahead[number].append(token)

    def replayed(self, forest: Forest, changes: ThreadChanges) -> None:
        """To be called when the forest has been advanced by a verdict with these effects. Verdicts are replayed in order."""
        for number, tokens in changes.accepted.items():
            del self._ahead[number][: len(tokens)]
            if not self._ahead[number]:
                self._stopped.discard(number)
            sampler = self._samplers.get(number)
            if sampler is not None:
                sampler.add_accepted(changes.committed[number])
        for start in changes.starts:
            self._samplers[start.thread] = self._make_sampler(start.thread, forest.sequence)

    def _make_sampler(self, number: int, sequence: Sequence) -> Sampler | None:
        """A thread's sampler, initialised for penalties with all tokens visible to the thread except those in its tree."""
        stream = sequence.threads[number].noise_stream
        sampler = Sampler.create(self._sampling, self._vocab_size, self._device, stream)
        if sampler is None or not self._sampling.has_penalties:
            return sampler
        for chunk in self._prompt:
            sampler.add_prompt(chunk)
        seen = (*sequence.context(number), (number, max(sequence.threads[number].num_tokens - 1, 0)))
        visible = [token for other, count in seen for token in sequence.threads[other].token_ids[:count]]
        sampler.add_accepted(torch.tensor(visible, dtype=torch.int64, device=self._device))
        return sampler
