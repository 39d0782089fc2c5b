"""An answer in several decode threads: a method for each of them, and one budget of rows for all (APAR §2, PASTA §3).

Owns what rank 0 replays, and in what order rows enter: first those that are certain, then candidates. How candidates are found is
the business of a *team*: ``Members`` runs any method on each thread by itself, ``BestFirstTeam`` compares candidates of all.
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

MAX_THREADS = 32  # that have rows in one step, and
MAX_ROWS = MAX_VERDICT_TOKENS - MAX_THREADS - 1  # of a step: its verdict must fit into a message's header


class Team(Protocol):
    """Finds the rows of all threads. ``forest`` holds what has entered, and has been advanced when ``apply`` is called."""

    @property
    def masks(self) -> MaskParams: ...

    def prefill(self, token_ids: Tensor) -> None:
        """Take in the next chunk of the prompt: int64 [R]."""

    def draft(self) -> None:
        """The compute phase of rank 0."""

    def apply(self, changes: ThreadChanges, parts: dict[int, Part]) -> None:
        """Follow a verdict."""

    def propose(self, room: int) -> list[tuple[int, Step]]:
        """At most ``room`` rows that enter at the next timestep, by thread."""

    def observe(self, timing: TimestepTiming) -> None:
        """What a timestep of the full pipeline took."""


class Threaded:
    """A ``Method`` for an answer in several threads."""

    def __init__(self, forest: Forest, team: Team, device: torch.device | str) -> None:
        self.hits = 0
        self.misses = 0
        self._forest = forest
        self._team = team
        self._device = device
        self._last: dict[int, int] = {}  # last tokens of ended threads, which enter without a successor

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
        """Last tokens of ended threads first: a join token may enter in the same step, and sees them."""
        last = dict(list(self._last.items())[:MAX_THREADS])
        for number in last:
            del self._last[number]
        steps = [(number, self._certain(token)) for number, token in last.items()]
        if not self._last:
            steps += self._team.propose(MAX_ROWS - len(steps))
        if not steps:
            return None
        token_ids = torch.cat([step.token_ids for _, step in steps])
        parents = torch.cat([step.parents for _, step in steps])
        threads = torch.cat([torch.full_like(step.parents, number) for number, step in steps])
        order = is_mask(token_ids).int().sort(stable=True).indices  # masks come behind all other rows
        step = Step(token_ids[order], parents[order], threads=threads[order])
        self._forest.append(step.token_ids, step.parents, threads[order])
        return step

    def _certain(self, token: int) -> Step:
        return Step(torch.tensor([token], device=self._device), torch.tensor([-1], device=self._device))

    def observe(self, timing: TimestepTiming) -> None:
        self._team.observe(timing)
