"""Verdicts on an answer in several decode threads: each thread's own walk, its bans, its noise.

Knows the rows that the last stage has computed and what may follow them; knows no model and no cache. Between a verdict and its
replay further rows may arrive, so it has a ``Sequence`` of its own, which is ahead of the forest's.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum

import torch
from torch import Tensor

from pipedec.core import Part, SamplingParams
from pipedec.forest import Forest, Turn, paths
from pipedec.sampling import Sampler, greedy
from pipedec.threads import Opened, Sequence, State
from pipedec.tree import PredictionTree


class _Kind(Enum):
    TEXT = "text"
    OPENER = "opener"  # opens a child; its thread goes on
    OTHER = "other"  # its thread waits or ends: what comes next depends on other threads


class ThreadJudge:
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
        self._ahead: dict[int, list[tuple[int, _Kind]]] = defaultdict(list)  # accepted and not replayed, of each thread
        self.judged_rows: list[int] = []  # the rows whose successors the last verdict accepted, one per token

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
        self._ahead[0].append((int(token[0]), self._accept(0, int(token[0]))))
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

    def judge(self, forest: Forest, successors_N: Tensor) -> list[Part]:
        """Walk on in every thread from its last accepted token along the target's own tokens, as deep as computed rows go.

        Args:
            forest: the last stage's; all its rows are computed.
            successors_N: int64 [N], the target's token after each of them.
        """
        parts = []
        self.judged_rows = []
        successors = successors_N.tolist()
        for number in list(forest.trees):
            rows = self._walk(forest, number, successors)
            if rows:
                parts.append(Part(number, tuple(successors[row] for row in rows)))
                self.judged_rows += rows
        return parts

    def _walk(self, forest: Forest, number: int, successors: list[int]) -> list[int]:
        """The rows whose successors are accepted. Behind a control token nothing is, but what an opener's own row yields."""
        tree = forest.trees[number]
        row = self._last_accepted(tree, number)
        own = forest.rows_of(number).tolist()
        rows: list[int] = []
        ahead = self._ahead[number]
        while row is not None and self._ahead_sequence.threads[number].state is State.RUNNING:
            is_behind_opener = bool(ahead) and ahead[-1][1] is _Kind.OPENER
            token = successors[own[row]]
            rows.append(own[row])
            ahead.append((token, self._accept(number, token)))
            goes_on = ahead[-1][1] is not _Kind.OTHER and not is_behind_opener
            row = tree.child(row, token) if goes_on else None
        return rows

    def _last_accepted(self, tree: PredictionTree, number: int) -> int | None:
        """The row of the thread's last accepted token, if it is there and its successor can be relied upon."""
        row = 0 if tree.num_rows else None
        before = _Kind.TEXT
        for token, kind in self._ahead[number]:
            if row is None or kind is _Kind.OTHER or before is not _Kind.TEXT:
                return None
            row, before = tree.child(row, token), kind
        return row

    def _accept(self, number: int, token: int) -> _Kind:
        sequence = self._ahead_sequence
        ends_walk = sequence.ends_walk(number, token)
        events = sequence.accept(number, token)
        if any(isinstance(event, Opened) and event.thread == number for event in events):
            return _Kind.OPENER
        return _Kind.OTHER if ends_walk else _Kind.TEXT

    def replayed(self, forest: Forest, turn: Turn) -> None:
        """The forest has been advanced to the oldest verdict that it had not been advanced to."""
        for number, tokens in turn.accepted.items():
            del self._ahead[number][: len(tokens)]
            sampler = self._samplers.get(number)
            if sampler is not None:
                sampler.add_accepted(turn.committed[number])
        for start in turn.starts:
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
