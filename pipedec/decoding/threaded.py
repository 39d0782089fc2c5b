"""Decoding an answer in several threads, which share the rows of each timestep (APAR §2, PASTA §3).

Owns rank 0's copy of the forest, and the order in which rows enter: first the last tokens of ended threads, then the rows that
a *team* selects. ``Members`` runs a method on each thread separately; ``BestFirstTeam`` compares candidates of all threads.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import MAX_VERDICT_TOKENS, MaskParams, Part, Step, Verdict
from pipedec.decoding.controller import TimestepTiming
from pipedec.forest import Forest, ThreadChanges
from pipedec.threads import Sequence, State
from pipedec.tree import is_mask

MAX_THREADS = 32  # maximum threads with rows in one step
MAX_ROWS = MAX_VERDICT_TOKENS - MAX_THREADS - 1  # maximum rows of a step, so that its verdict fits into a message's header


class Team(Protocol):
    """Selects the rows of all threads. It shares the ``Forest`` of ``Threaded``, which holds the rows that have entered."""

    @property
    def masks(self) -> MaskParams: ...

    def prefill(self, token_ids: Tensor) -> None:
        """Process the next chunk of the prompt: int64 [any number]."""

    def draft(self) -> None:
        """Run the draft model, while the stages compute."""

    def apply(self, changes: ThreadChanges, parts: dict[int, Part]) -> None:
        """Follow a verdict, by which the forest has been advanced.

        Args:
            changes: its effects on the threads.
            parts: its accepted tokens and forecasts, by thread.
        """

    def propose(self, room: int) -> list[tuple[int, Step]]:
        """The rows that enter at the next timestep, at most ``room``: (thread number, step)."""

    def observe(self, timing: TimestepTiming) -> None:
        """Learn from the timing of a timestep of the full pipeline."""


class Threaded:
    """A ``Method`` for an answer in several threads."""

    def __init__(self, forest: Forest, team: Team, device: torch.device | str) -> None:
        self.hits = 0
        self.misses = 0
        self._forest = forest
        self._team = team
        self._device = device
        self._last: dict[int, int] = {}  # by thread: last tokens of ended threads that have yet to enter

    @property
    def masks(self) -> MaskParams:
        return self._team.masks

    @property
    def sequence(self) -> Sequence:
        return self._forest.sequence

    def prefill(self, token_ids: Tensor) -> None:
        self._team.prefill(token_ids)

    def draft(self) -> None:
        self._team.draft()

    def apply(self, verdict: Verdict) -> None:
        _, changes = self._forest.advance(verdict)
        if changes.affects_threads:
            self._forest.release()
        self._count(changes)
        if self.sequence.finished is not None:
            return
        self._last |= {number: token for number, token in changes.last.items() if not self._forest.has_root(number)}
        self._team.apply(changes, {part.thread: part for part in verdict.parts()})

    def _count(self, changes: ThreadChanges) -> None:
        for number, tokens in changes.accepted.items():
            self.hits += len(tokens) - 1
            if self.sequence.threads[number].state is State.RUNNING:
                has_entered = self._forest.has_root(number)
                self.hits += has_entered
                self.misses += not has_entered

    def propose(self) -> Step | None:
        """The rows of all threads. Last tokens of ended threads go first: a join token in the same step attends to them."""
        last = dict(list(self._last.items())[:MAX_THREADS])
        for number in last:
            del self._last[number]
        steps = [(number, self._root_step(token)) for number, token in last.items()]
        if not self._last:
            steps += self._team.propose(MAX_ROWS - len(steps))
        if not steps:
            return None
        token_ids = torch.cat([step.token_ids for _, step in steps])
        parents = torch.cat([step.parents for _, step in steps])
        threads = torch.cat([torch.full_like(step.parents, number) for number, step in steps])
        order = is_mask(token_ids).int().sort(stable=True).indices  # masks are the last rows of a step
        step = Step(token_ids[order], parents[order], threads=threads[order])
        self._forest.append(step.token_ids, step.parents, threads[order])
        return step

    def _root_step(self, token: int) -> Step:
        return Step(torch.tensor([token], device=self._device), torch.tensor([-1], device=self._device))

    def observe(self, timing: TimestepTiming) -> None:
        self._team.observe(timing)
