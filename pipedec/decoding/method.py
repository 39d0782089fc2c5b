"""A decoding method at work on one answer: the answer's threads, and the policy that selects their rows (APAR §2, PASTA §3).

Owns the order in which rows enter: first the last tokens of ended threads, then the rows that the policy selects. An answer in
one thread is an answer whose sequence cannot fork.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pipedec.core import MaskParams, Step, Verdict
from pipedec.decoding.budget import Wish
from pipedec.decoding.interface import Member, Policy
from pipedec.decoding.lockstep import Drafting
from pipedec.decoding.tally import Tally
from pipedec.forest import Remaining, ThreadChanges, apply_verdict, position_root
from pipedec.threads import Sequence, State
from pipedec.tree import is_mask


class Method:
    """Runs on rank 0 behind its prompt. In every timestep: ``propose``, ``draft``, and ``apply`` if there is a verdict.

    Args:
        sequence: the answer's threads, just begun. The method alone passes accepted tokens to it.
        tally: counts for all requests.

    Attributes:
        hits, misses: see ``Metrics``. The first token of an answer or of a child is neither.
    """

    def __init__(self, sequence: Sequence, policy: Policy, tally: Tally) -> None:
        self.hits = 0
        self.misses = 0
        self.sequence = sequence
        self._policy = policy
        self._tally = tally
        self._depths: dict[int, int] = {}  # by thread: accepted tokens behind the root that entered last
        self._members: dict[int, Member] = {0: policy.create(0)}  # by thread, of those that have not ended
        self._last: dict[int, int] = {}  # by thread: last tokens of ended threads that have yet to enter
        self._running: dict[int, Member] = dict(self._members)  # those of running threads

    @property
    def masks(self) -> MaskParams:
        """The mask rows behind the prompt and behind rows of the method's steps."""
        return self._policy.masks

    @property
    def has_drafter(self) -> bool:
        """Whether it asks the draft model."""
        return self._policy.drafter is not None

    def draft(self) -> Drafting:
        """What the draft model is to compute below rows in flight, or for the rows that enter next."""
        return self._policy.draft(self._running)

    def apply(self, verdict: Verdict) -> None:
        """Advance to the accepted tokens and prune what can no longer be accepted."""
        changes = apply_verdict(self.sequence, verdict)
        for accepted in verdict.accepted:
            if accepted.thread in changes.accepted:
                self._members[accepted.thread].accept(accepted)
        if changes.affects_threads:
            self._follow(changes)
        for number, member in self._members.items():
            if member.tree is not None:
                position_root(member.tree, self.sequence, number)
        self._count(changes)

    def _follow(self, changes: ThreadChanges) -> None:
        """Open, cut and close the members of threads."""
        self._last |= {number: token for number, token in changes.last.items() if not self._members[number].has_entered}
        if self.sequence.finished is not None:
            self._last.clear()
        for number, remaining in changes.remaining.items():
            if remaining is not Remaining.SUBTREE and number in self._members:
                self._members[number].cut()
        for start in changes.starts:
            if start.thread not in self._members:
                self._members[start.thread] = self._policy.create(start.thread)
            self._members[start.thread].plant(start.token)
        threads = self.sequence.threads
        self._members = {number: one for number, one in self._members.items() if threads[number].state is not State.ENDED}
        self._running = {number: one for number, one in self._members.items() if threads[number].state is State.RUNNING}
        if self._policy.drafter is not None:
            self._policy.drafter.threads_changed()

    def _count(self, changes: ThreadChanges) -> None:
        for number, tokens in changes.accepted.items():
            goes_on = self.sequence.threads[number].state is State.RUNNING
            is_hit = goes_on and self._members[number].has_entered
            hits, depth = len(tokens) - 1 + is_hit, self._depths.get(number, 0)
            self.hits += hits
            self.misses += goes_on and not is_hit
            self._tally.accept(depth, hits)
            self._depths[number] = depth + hits if is_hit else 0

    @property
    def is_tuned(self) -> bool:
        """Whether it leaves the number of its rows to what is measured."""
        return self._policy.is_tuned

    @property
    def together(self) -> int:
        """Rows of the largest step that enters whole; 1 if its rows may enter one by one."""
        return self._policy.together

    @property
    def in_flight(self) -> int:
        """Rows that have entered and that no verdict has accepted or pruned, but for the last tokens of ended threads."""
        return sum(member.in_flight for member in self._members.values())

    @property
    def rests(self) -> bool:
        """Whether it lets nothing enter and has nothing drafted before the next verdict."""
        return not self._last and self._policy.rests(self._running)

    def wish(self) -> Wish:
        """What it would let enter the first stage at the next timestep."""
        wish, last = self._policy.wish(self._running), len(self._last)
        if not last:
            return wish
        return replace(wish, whole=wish.whole + last) if wish.whole else replace(wish, certain=wish.certain + last)

    def propose(self, room: int) -> Step | None:
        """The rows that enter the first stage at the next timestep, or None.

        Last tokens of ended threads go first: a join token in the same step attends to them.

        Args:
            room: maximum rows; what enters whole is what was wished.
        """
        room = self._policy.largest or room
        last = list(self._last.items())[:room]
        for number, _ in last:
            del self._last[number]
        steps = [(number, self._root_step(token)) for number, token in last]
        drafts = 0
        if not self._last:
            without_rows = {number for number, member in self._running.items() if not member.has_entered}
            steps += self._policy.propose(self._running, room - len(steps))
            drafts = sum(number in without_rows for number, _ in steps[len(last) :])
        self._tally.enter_roots(drafts, len(last))
        if not steps:
            return None
        return _merged(steps) if self.sequence.can_fork else steps[0][1]

    def _root_step(self, token: int) -> Step:
        return Step(torch.tensor([token]), torch.tensor([-1]))


def _merged(steps: list[tuple[int, Step]]) -> Step:
    """One step of the rows of several threads; masks are its last rows."""
    token_ids = torch.cat([step.token_ids for _, step in steps])
    parents = torch.cat([step.parents for _, step in steps])
    threads = torch.cat([torch.full_like(step.parents, number) for number, step in steps])
    order = is_mask(token_ids).int().sort(stable=True).indices
    return Step(token_ids[order], parents[order], threads=threads[order])
