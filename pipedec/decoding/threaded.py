"""The method of an answer in several decode threads (APAR §2, PASTA §3): one method for each thread that has not ended.

Owns the order in which rows of threads enter: first the last tokens of ended threads, to which a join token in the same step
attends, then the rows that the threads' methods propose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice, repeat
from operator import itemgetter

import torch

from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import Step
from pipedec.core.verdict import Accepted, Verdict
from pipedec.decoding.budget import Demand
from pipedec.decoding.method import ROWS_OF_SEVERAL_THREADS, DraftRoom, Entering, Method, Resources, new_method
from pipedec.threads import Sequence as ThreadSequence
from pipedec.threads import State
from pipedec.tree import Remaining, ThreadChanges, is_mask, position_root


class ThreadedMethod(Method):
    """The methods of all threads. Raises UserError as ``new_method``."""

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources) -> None:
        super().__init__(request, sequence, resources)
        first = new_method(request, sequence, resources)
        self._methods: dict[int, Method] = {0: first}  # by thread that has not ended
        self._running: dict[int, Method] = {0: first}  # by running thread
        self._last: dict[int, int] = {}  # by thread: last tokens of ended threads that have yet to enter
        self._order: list[int] = []  # thread of each row that may enter at the next timestep: certain rows first, then by chance
        self._next_thread = 0  # the first thread to be served, if the last step had no room for all
        self.masks, self.drafter, self.children = first.masks, first.drafter, first.children
        self.is_tuned, self.fills = first.is_tuned, first.fills
        self.whole = max(first.whole, ROWS_OF_SEVERAL_THREADS) if first.whole else 0

    @property
    def in_flight(self) -> int:
        """Without the last tokens of ended threads."""
        return sum([method.in_flight for method in self._methods.values()])

    @property
    def is_idle(self) -> bool:
        return not self._last and all(method.is_idle for method in self._running.values())

    def lane_opened(self) -> None:
        for method in self._methods.values():
            method.lane_opened()
            self.children = method.children

    def index_text(self, most: int) -> int:
        return next((count for method in self._methods.values() if (count := method.index_text(most))), 0)

    def demand(self) -> Demand:
        demands = {number: method.demand() for number, method in self._running.items()}
        if self.whole:
            whole = min(sum(demand.whole for demand in demands.values()), self.whole)
            return Demand(whole=whole + len(self._last)) if whole else Demand(certain=len(self._last))
        self._order = [number for number, demand in demands.items() for _ in range(demand.certain)]
        most = next((demand.most for demand in demands.values()), None)
        certain = len(self._order) if most is None else min(len(self._order), most)
        return Demand(certain + len(self._last), chances=self._ordered(demands), most=most)

    def _ordered(self, demands: dict[int, Demand]) -> Iterator[float]:
        """The chances of candidates of all threads, best first. Records their threads in ``_order``."""
        for chance, number in _ranked({number: demand.chances for number, demand in demands.items()}):
            self._order.append(number)
            yield chance

    def certain_rows(self, demand: Demand) -> int:
        return self.together if demand.whole else demand.certain

    def enter(self, room: int) -> Entering | None:
        room = self.whole or room
        last = list(self._last.items())[:room]
        for number, _ in last:
            del self._last[number]
        steps = [(number, Step(torch.tensor([token]), torch.tensor([-1]))) for number, token in last]
        refills = 0
        if not self._last:
            without_rows = {number for number, method in self._running.items() if method.root is not None}
            room -= len(steps)
            if self.whole:
                steps += self._propose_whole(room)
            else:
                rooms = Counter(self._order[:room])
                best = ((number, self._running[number].propose(rooms[number])) for number in sorted(rooms))
                steps += [(number, step) for number, step in best if step is not None]
            refills = sum(number in without_rows for number, _ in steps[len(last) :])
        return Entering(_joined(steps), len(last) + refills, refills) if steps else None

    def propose(self, room: int) -> Step | None:
        entering = self.enter(room)
        return None if entering is None else entering.step

    def _propose_whole(self, room: int) -> list[tuple[int, Step]]:
        """Steps of threads, which share the rows evenly."""
        running = self._running
        share = max(room // max(len(running), 1), 1)
        steps: list[tuple[int, Step]] = []
        for number in sorted(running, key=lambda number: (number < self._next_thread, number)):
            if room < share:
                self._next_thread = number
                break
            if not self._sees_opener(number, {proposed for proposed, _ in steps}):
                continue
            step = running[number].propose(share)
            if step is not None:
                steps.append((number, step))
                room -= step.num_rows
        return steps

    def _sees_opener(self, number: int, entering: set[int]) -> bool:
        """Whether the opener of a thread has entered, or enters now. It is missing at most if it is its thread's last token."""
        threads = self.sequence.threads
        parent, opened_at = threads[number].parent, threads[number].opened_at
        if parent is None or parent not in self._running or parent in entering or threads[parent].num_tokens > opened_at:
            return True
        return self._running[parent].root is None

    def ask(self, room: DraftRoom) -> list[tuple[Method, Sequence[int]]]:
        """Several threads share twice the rows of one."""
        running = self._running
        if len(running) > 1 and not self.whole:
            ranked = _ranked({number: method.undrafted_chances() for number, method in running.items()})
            rooms = Counter(number for _, number in islice(ranked, 2 * room.rows))
            asked = [
                (method, method.draft(room._replace(rows=rooms[number]))) for number, method in running.items() if number in rooms
            ]
        else:
            asked = [(method, method.draft(room)) for method in running.values()]
        return [(method, rows) for method, rows in asked if rows]

    def follow(self, verdict: Verdict, changes: ThreadChanges) -> tuple[int, int]:
        for accepted in verdict.accepted:
            if accepted.thread in changes.accepted:
                self.accept(accepted)
        threads = self.sequence.threads
        if changes.affects_threads:
            self._follow_threads(changes)
        counts = [self._methods[number].count_accepted(len(tokens)) for number, tokens in changes.accepted.items()]
        if changes.affects_threads:
            self._methods = {number: one for number, one in self._methods.items() if threads[number].state is not State.ENDED}
            self._running = {number: one for number, one in self._methods.items() if threads[number].state is State.RUNNING}
            if self.drafter is not None:
                self.drafter.threads_changed(self.request.number)
        for number, method in self._methods.items():
            if method.tree is not None:
                position_root(method.tree, self.sequence, number)
        return sum(hits for hits, _ in counts), sum(misses for _, misses in counts)

    def _follow_threads(self, changes: ThreadChanges) -> None:
        """Cut the methods of threads that have ended or wait, and plant the roots of those that start."""
        self._last |= {number: token for number, token in changes.last.items() if self._methods[number].root is not None}
        if self.sequence.finished is not None:
            self._last.clear()
        for number, remaining in changes.remaining.items():
            if remaining is not Remaining.SUBTREE and number in self._methods:
                self._methods[number].cut()
        for start in changes.starts:
            if start.thread not in self._methods:
                method = self._methods[start.thread] = new_method(self.request, self.sequence, self.resources, start.thread)
                method.children = self.children
            self._methods[start.thread].plant(start.token)

    def accept(self, accepted: Accepted) -> None:
        self._methods[accepted.thread].accept(accepted)

    def cut(self) -> None:
        for method in self._methods.values():
            method.cut()


def _ranked(chances: dict[int, Iterable[float]]) -> Iterator[tuple[float, int]]:
    """Chances of several threads, best first, each with its thread; equal ones in the order of threads."""
    return merge(*(zip(of_thread, repeat(number)) for number, of_thread in chances.items()), key=itemgetter(0), reverse=True)


def _joined(steps: list[tuple[int, Step]]) -> Step:
    """One step of the rows of several threads; masks are its last rows."""
    rows = Step.concatenated(
        [Step(step.token_ids, step.parents, threads=torch.full_like(step.parents, number)) for number, step in steps]
    )
    assert rows.threads is not None
    order = is_mask(rows.token_ids).int().sort(stable=True).indices
    return Step(rows.token_ids[order], rows.parents[order], threads=rows.threads[order])
