"""The policy of methods that decode each thread by itself; threads share the rows of a timestep evenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipedec.core import MaskParams, Step
from pipedec.decoding.budget import Wish
from pipedec.decoding.context import MethodContext
from pipedec.decoding.interface import Member
from pipedec.decoding.lockstep import Drafting, in_lockstep

ROWS_OF_SEVERAL_THREADS = 128  # rows of a step that running threads share; more if the method's own options allow one thread more


class ThreadMember(Member, Protocol):
    """A method for one thread.

    Attributes:
        room: maximum rows of the next step; at first the most that its options allow.
    """

    room: int

    @property
    def masks(self) -> MaskParams: ...

    @property
    def wanted(self) -> int:
        """Rows of its next step, at most: they enter together or not at all. 0 if there is none."""

    def draft(self) -> Drafting:
        """What the draft model is to compute below rows in flight, or for the rows that enter next."""

    def propose(self) -> Step | None:
        """The rows that enter at the next timestep, or None."""


class Members:
    """A member of the same kind for every thread.

    Args:
        kind: creates the member for a thread number.
    """

    def __init__(self, context: MethodContext, kind: Callable[[MethodContext, int], ThreadMember]) -> None:
        self._context = context
        self._kind = kind
        first = kind(context, 0)
        self.masks = first.masks
        self.largest = max(first.room, ROWS_OF_SEVERAL_THREADS)
        self.together = first.room if context.request.threads is None else self.largest
        self.drafter = context.drafter
        self.is_tuned = False
        self._next_thread = 0  # the thread that is served first in the next timestep, if the rows did not suffice for all

    def create(self, number: int) -> ThreadMember:
        return self._kind(self._context, number)

    def draft(self, running: dict[int, ThreadMember]) -> Drafting:
        return in_lockstep(member.draft() for member in running.values())

    def rests(self, running: dict[int, ThreadMember]) -> bool:
        return all(member.tree is None and member.has_entered for member in running.values())

    def wish(self, running: dict[int, ThreadMember]) -> Wish:
        return Wish(whole=min(sum(member.wanted for member in running.values()), self.largest))

    def propose(self, running: dict[int, ThreadMember], room: int) -> list[tuple[int, Step]]:
        share = max(room // max(len(running), 1), 1)
        order = sorted(running, key=lambda number: (number < self._next_thread, number))
        steps: list[tuple[int, Step]] = []
        for number in order:
            if room < share:
                self._next_thread = number
                break
            if not self._sees_opener(number, running, {proposed for proposed, _ in steps}):
                continue
            running[number].room = share
            step = running[number].propose()
            if step is not None:
                steps.append((number, step))
                room -= step.num_rows
        return steps

    def _sees_opener(self, number: int, running: dict[int, ThreadMember], entering: set[int]) -> bool:
        """Whether the opener of a thread has entered, or enters now. It can only be missing if it is its thread's last token."""
        threads = self._context.sequence.threads
        parent, opened_at = threads[number].parent, threads[number].opened_at
        if parent is None or parent not in running or parent in entering or threads[parent].num_tokens > opened_at:
            return True
        return running[parent].has_entered
