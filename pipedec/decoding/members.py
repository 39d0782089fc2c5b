"""A separate instance of a method for every thread of an answer; threads share the rows of a timestep evenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pipedec.core import MaskParams, Part, Step, Verdict
from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.thread_drafter import ForestDrafter
from pipedec.decoding.threaded import MAX_THREADS
from pipedec.forest import Forest, Remaining, ThreadChanges, position_root
from pipedec.threads import State
from pipedec.tree import PredictionTree


class Member(Protocol):
    """A method that can decode one of several threads: a ``Method`` with calls for the events of its thread.

    Attributes:
        room: maximum rows of the next step.
    """

    room: int

    @property
    def masks(self) -> MaskParams: ...
    @property
    def tree(self) -> PredictionTree | None:
        """Its tree; None if it has none."""

    def prefill(self, token_ids: Tensor) -> None: ...
    def draft(self) -> None: ...
    def apply(self, verdict: Verdict) -> None: ...
    def propose(self) -> Step | None: ...
    def observe(self, timing: TimestepTiming) -> None: ...

    def cut(self) -> None:
        """Drop all rows: the thread waits or has ended."""

    def plant(self, token: int) -> None:
        """Start again from a certain token, a forced token or a join token."""


class Members:
    """The ``Team`` of methods that decode each thread separately.

    Args:
        make: creates the method for a thread number.
        drafter: used by all of them; None if they need no draft model.
    """

    def __init__(self, forest: Forest, make: Callable[[int], Member], drafter: ForestDrafter | None) -> None:
        self._forest = forest
        self._make = make
        self._drafter = drafter
        self._members = {0: make(0)}
        self._next_thread = 0  # the thread that is served first in the next timestep, if the rows did not suffice for all

    @property
    def masks(self) -> MaskParams:
        return self._members[0].masks

    def prefill(self, token_ids: Tensor) -> None:
        self._members[0].prefill(token_ids)

    def draft(self) -> None:
        for member in self._running().values():
            member.draft()

    def apply(self, changes: ThreadChanges, parts: dict[int, Part]) -> None:
        threads = self._forest.sequence.threads
        for number, tokens in changes.accepted.items():
            member = self._members[number]
            member.apply(Verdict(tokens, None, parts[number].forecast))
        for number, remaining in changes.remaining.items():
            if number in self._members and remaining is not Remaining.SUBTREE:
                self._members[number].cut()
        for start in changes.starts:
            if start.thread not in self._members:
                self._members[start.thread] = self._make(start.thread)
            self._members[start.thread].plant(start.token)
        for number in [number for number in self._members if threads[number].state is State.ENDED and number > 0]:
            del self._members[number]
        for number, member in self._members.items():
            if member.tree is not None:
                position_root(member.tree, self._forest.sequence, number)
        if self._drafter is not None and changes.affects_threads:
            self._drafter.threads_changed()

    def propose(self, room: int) -> list[tuple[int, Step]]:
        running = self._running()
        share = max(room // max(len(running), 1), 1)
        order = sorted(running, key=lambda number: (number < self._next_thread, number))
        steps: list[tuple[int, Step]] = []
        for number in order:
            if room < share or len(steps) == MAX_THREADS:
                self._next_thread = number
                break
            if not self._sees_opener(number, {proposed for proposed, _ in steps}):
                continue
            running[number].room = share
            step = running[number].propose()
            if step is not None:
                steps.append((number, step))
                room -= step.num_rows
        return steps

    def _sees_opener(self, number: int, entering: set[int]) -> bool:
        """Whether the opener of a thread has entered, or its parent is among the threads that are ``entering`` now."""
        thread = self._forest.sequence.threads[number]
        return thread.parent is None or thread.parent in entering or self._forest.entered(thread.parent) >= thread.opened_at

    def observe(self, timing: TimestepTiming) -> None:
        for member in self._members.values():
            member.observe(timing)

    def _running(self) -> dict[int, Member]:
        threads = self._forest.sequence.threads
        return {number: member for number, member in self._members.items() if threads[number].state is State.RUNNING}
