"""Verdicts on an answer in several decode threads: each thread's own walk, its bans, its noise.

Knows the rows that the last stage has computed and what may follow them; knows no model and no cache. Between a verdict and its
replay further rows may arrive, so it has a ``Sequence`` of its own, which is ahead of the forest's.
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
    """Chooses the token after each row, and accepts as far as the rows of each thread go.

    Args:
        sequence: a fresh one.
    """

    def __init__(self, sequence: Sequence, sampling: SamplingParams, vocab_size: int, device: torch.device | str) -> None:
        self._ahead_sequence = sequence
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._device = device
        self._prompt: list[Tensor] = []  # its chunks, where penalties need them
        self._samplers: dict[int, Sampler | None] = {}
        self._ahead: dict[int, list[int]] = defaultdict(list)  # accepted tokens of each thread that are not replayed
        self._halted: set[int] = set()  # threads whose last token of those joins or ends: what comes next needs a replay
        self.verified_rows: list[int] = []  # the rows whose successors the last verdict accepted, one per token

    @property
    def finished(self) -> str | None:
        return self._ahead_sequence.finished

    def add_prompt(self, token_ids: Tensor) -> None:
        """Take in a chunk of the prompt: int64."""
        if self._sampling.has_penalties:
            self._prompt.append(token_ids)

    def first(self, logits_1V: Tensor) -> Tensor:
        """int64 [1], the first token of the answer, from the logits of the prompt's last."""
        position, banned = self._ahead_sequence.following(0, [])
        tree = PredictionTree(self._device)
        logits_1V = logits_1V.clone()
        logits_1V[:, list(banned)] = -torch.inf
        token = self._chosen(0, self._ahead_sequence, logits_1V, torch.tensor([position], device=self._device), tree, slice(0, 0))
        self._accept(0, int(token[0]))
        return token

    def choose(self, logits_RV: Tensor, forest: Forest, rows: Tensor) -> Tensor:
        """int64 [R], the token that follows each of ``rows``, the last ones that have entered (masks apart)."""
        logits_RV = logits_RV.clone()
        chosen = torch.zeros_like(rows)
        threads = forest.threads[rows]
        for number in threads.unique().tolist():
            of_step = torch.nonzero(threads == number)[:, 0]
            own = torch.searchsorted(forest.rows_of(number), rows[of_step])
            positions = self._ban(logits_RV, of_step, forest, number, own)
            tree, logits = forest.trees[number], logits_RV[of_step]
            chosen[of_step] = self._chosen(number, forest.sequence, logits, positions, tree, own)
        return chosen

    def _ban(self, logits_RV: Tensor, of_step: Tensor, forest: Forest, number: int, own: Tensor) -> Tensor:
        """Rule out what may not follow rows ``own`` of a thread's tree; int64, where what follows them stands."""
        positions = []
        for place, path in zip(of_step.tolist(), paths(forest.trees[number], own.tolist()), strict=True):
            position, banned = forest.sequence.following(number, path)
            positions.append(position)
            logits_RV[place, list(banned)] = -torch.inf
        return torch.tensor(positions, device=self._device)

    def _chosen(
        self, number: int, sequence: Sequence, logits: Tensor, positions: Tensor, tree: PredictionTree, rows: Tensor | slice
    ) -> Tensor:
        if number not in self._samplers:
            self._samplers[number] = self._sampler(number, sequence)
        sampler = self._samplers[number]
        if sampler is None:
            return greedy(logits)
        mask_RN = tree.tree_mask[rows] if tree.num_rows else torch.zeros(len(logits), 0, dtype=torch.bool, device=self._device)
        return sampler.choose(logits, positions, mask_RN, tree.token_ids.clamp(min=0))

    def scores(self, logits_RV: Tensor, threads_R: Tensor, places_R: Tensor) -> Tensor:
        """[R, V]: by which mask rows rank what they name for these places (see ``Sampler.scores``)."""
        scores_RV = logits_RV.double()
        for number in threads_R.unique().tolist():
            sampler, own = self._samplers.get(number), threads_R == number
            if sampler is not None:
                scores_RV[own] = sampler.scores(logits_RV[own], places_R[own])
        return scores_RV

    def verify(self, forest: Forest, successors_N: Tensor) -> list[Part]:
        """Walk on in every thread from its last accepted token along the target's own tokens, as deep as computed rows go.

        Args:
            forest: the last stage's; all its rows are computed.
            successors_N: int64 [N], the target's token after each of them.
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
        """The rows whose successors are accepted. Behind a token that joins or ends a thread nothing is."""
        tree = forest.trees[number]
        row = self._last_accepted(tree, number)
        own = forest.rows_of(number).tolist()
        rows: list[int] = []
        while row is not None and self._ahead_sequence.threads[number].state is State.RUNNING:
            token = successors[own[row]]
            rows.append(own[row])
            self._accept(number, token)
            row = None if number in self._halted else tree.child(row, token)
        return rows

    def _last_accepted(self, tree: PredictionTree, number: int) -> int | None:
        """The row of the thread's last accepted token, if it is there and its successor can be relied upon."""
        row = 0 if tree.num_rows and number not in self._halted else None
        for token in self._ahead[number]:
            row = None if row is None else tree.child(row, token)
        return row

    def _accept(self, number: int, token: int) -> None:
        if self._ahead_sequence.ends_walk(number, token):
            self._halted.add(number)
        self._ahead_sequence.accept(number, token)
        self._ahead[number].append(token)

    def replayed(self, forest: Forest, changes: ThreadChanges) -> None:
        """The forest has been advanced to the oldest verdict that it had not been advanced to."""
        for number, tokens in changes.accepted.items():
            del self._ahead[number][: len(tokens)]
            if not self._ahead[number]:
                self._halted.discard(number)
            sampler = self._samplers.get(number)
            if sampler is not None:
                sampler.add_accepted(changes.committed[number])
        for start in changes.starts:
            self._samplers[start.thread] = self._sampler(start.thread, forest.sequence)

    def _sampler(self, number: int, sequence: Sequence) -> Sampler | None:
        """A thread's sampler, which knows all that the thread's next token sees but the rows of its tree."""
        stream = sequence.threads[number].noise_stream
        sampler = Sampler.create(self._sampling, self._vocab_size, self._device, stream)
        if sampler is None or not self._sampling.has_penalties:
            return sampler
        for chunk in self._prompt:
            sampler.add_prompt(chunk)
        seen = (*sequence.context(number), (number, max(sequence.threads[number].num_tokens - 1, 0)))
        said = [token for other, count in seen for token in sequence.threads[other].token_ids[:count]]
        sampler.add_accepted(torch.tensor(said, dtype=torch.int64, device=self._device))
        return sampler
