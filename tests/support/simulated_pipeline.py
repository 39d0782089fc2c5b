"""Drives a scheduler through whole sessions without models: ranks are small state machines, run in random order.

Replaces the rank loops in tests of the paper's dispatcher, and shows the workflow of one answer. Rows are only counted.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pipedec.config import Settings
from pipedec.core.stage_message import RequestUpdate
from pipedec.core.verdict import Verdict
from pipedec.messages.run import RunDescription
from pipedec.scheduler.paper import Facts, initial_tasks, post_process, results_of
from pipedec.scheduler.protocol import Granted
from pipedec.scheduler.workflow import Planned, Task
from pipedec.topology import Topology
from support.whole_scheduler import WholeScheduler

Observer = Callable[[], None]
REQUEST = 5
TRACE_LINES = 10_000


class Output(NamedTuple):
    """What a rank has for the next one: rows, and whether it closes the request there."""

    rows: int = 0
    closes: bool = False

    def __bool__(self) -> bool:
        return self.rows > 0 or self.closes


NOTHING = Output()


@dataclass
class History:
    """What happened, in order.

    Attributes:
        received: (rank, what it was granted in one message) in the order of delivery.
        finished: tasks in the order in which they were done (a transfer once).
        reports: by rank, how many it made; of which every timestep has two at most.
        planned: every scheduling action, in the order of the reports that made it.
        verdicts: for each rank, those that it replayed; for rank 0 those of which it was told.
        hits: for each decoded token, whether its row was in flight at the previous verdict (as ``Metrics`` counts hits).
        closed: the stages at which the closing of the request has arrived.
        timesteps: until the last verdict.
    """

    received: list[tuple[int, tuple[Granted, ...]]] = field(default_factory=list)
    finished: list[Task] = field(default_factory=list)
    reports: dict[int, int] = field(default_factory=dict)
    planned: list[Planned] = field(default_factory=list)
    verdicts: dict[int, list[Verdict]] = field(default_factory=dict)
    hits: list[bool] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    timesteps: int = 0


class SimulatedPipeline:
    """All ranks of a session with one request. A hit keeps the rows of the last few exit ranks, a miss keeps none.

    Each move executes the next task of one rank, chosen by ``random_source``; a transfer needs both of its ranks. A rank that has
    done all that it was granted reports it.

    Args:
        num_tokens: length of the answer.
        hit_rate: probability that a verdict is a hit, where one is possible.
        repeat_rate: probability that a report is made twice.
        stop_after: number of tokens after which rank 0 ends the answer; the last stage does not know and goes on.

    Attributes:
        most_transfers: how many were possible at the same time, at most.

    Raises:
        AssertionError: no rank can move before the session has ended (a deadlock).
    """

    def __init__(
        self,
        topology: Topology,
        scheduler: WholeScheduler,
        random_source: random.Random,
        num_tokens: int,
        hit_rate: float = 0.6,
        repeat_rate: float = 0.0,
        stop_after: int | None = None,
    ) -> None:
        self.topology = topology
        self.scheduler = scheduler
        self.random = random_source
        self.num_tokens = num_tokens
        self.hit_rate = hit_rate
        self.repeat_rate = repeat_rate
        self.stop_after = stop_after or num_tokens
        self.history = History(verdicts={rank: [] for rank in topology.ranks}, reports=dict.fromkeys(topology.ranks, 0))
        self.most_transfers = 0
        self._kept: dict[int, int] = {}  # for each token, the number of exit ranks, counted from the last, that keep their rows
        self._current: dict[int, deque[Granted]] = {rank: deque() for rank in topology.ranks}
        self._done: dict[int, list[tuple[Task, Facts]]] = {rank: [] for rank in topology.ranks}
        self._arrived = dict.fromkeys(topology.ranks, NOTHING)
        self._waiting = dict.fromkeys(topology.ranks, NOTHING)
        self._held: Granted | None = None  # the task of rank 0 that is reported once it knows what it sends
        self._num_accepted = 0
        self._next_in_flight = False
        self._has_frontier = True  # whether rank 0 has rows that may follow
        self._is_closing = False
        self.has_ended = False

    def run(self, session: int = 0, trace: bool = False, observe: Observer | None = None) -> History:
        """Run a session from prefill to its end task. ``observe`` is called after every move."""
        if self.scheduler.current_epoch() is None:
            layers = tuple((rank - 1, rank) for rank in self.topology.ranks[1:])
            self.scheduler.open(RunDescription(Settings.of(target="target"), self.topology.groups, layers))
        planned = initial_tasks(self.topology)
        self.history.planned += planned
        self._waiting[0] = Output(1)
        self.scheduler.begin_session(session, planned, TRACE_LINES if trace else 0)
        while not self.has_ended:
            self._collect()
            movable = [rank for rank in self.topology.ranks if self._can_move(rank)]
            assert movable, f"deadlock: {self._current}"
            heads = {self._current[rank][0].task for rank in movable}
            self.most_transfers = max(self.most_transfers, sum(task.kind == "T" for task in heads))
            self._move(self.random.choice(movable))
            if observe is not None:
                observe()
        return self.history

    def _collect(self) -> None:
        for rank in self.topology.ranks:
            while not self._current[rank] and (message := self.scheduler.wait(rank, 0)) is not None:
                assert message.kind == "tasks" and message.tasks
                self.history.received.append((rank, message.tasks))
                self._current[rank].extend(message.tasks)

    def _can_move(self, rank: int) -> bool:
        """Whether the next task of ``rank`` can be executed. A transfer is the receiver's, once it is next at both ranks."""
        if not self._current[rank]:
            return False
        task = self._current[rank][0].task
        if task.kind == "C":
            return True
        sender = self._current[task.source]
        return rank == task.target and bool(sender) and sender[0].task == task

    def _move(self, rank: int) -> None:
        granted = self._current[rank].popleft()
        task = granted.task
        self.history.finished.append(task)
        if task.kind == "T":
            self._current[task.source].popleft()
            self._arrived[rank], self._waiting[task.source] = self._waiting[task.source], NOTHING
            assert self._arrived[rank], "what is empty is not sent"
            self._done[rank].append((task, Facts()))
        elif rank == 0:
            self._move_rank_zero(granted)
        else:
            self._done[rank].append((task, self._execute(rank, granted)))
        for one in {rank, task.source}:
            if one != 0 and not self._current[one] and self._done[one]:
                self._report(one)

    def _report(self, rank: int) -> None:
        done, self._done[rank] = self._done[rank], []
        planned = [plan for task, facts in done for plan in post_process(task, self.topology, facts)]
        self.history.planned += planned
        self.history.reports[rank] += 1
        tasks = [task for task, _ in done]
        self.scheduler.report(rank, tasks, planned)
        if self.random.random() < self.repeat_rate:
            self.scheduler.report(rank, tasks, planned)

    def _move_rank_zero(self, granted: Granted) -> None:
        """Its transfer is done before it drafts, and it reports what it sends next with the task before."""
        task = granted.task
        if task.name == "end":
            self.has_ended = True
            self._done[0].append((task, Facts()))
            self._report(0)
        elif task.name in ("pre", "dec") and (task.name == "pre" or self.topology.has_sync(granted.active)):
            self._done[0].append((task, Facts(active=granted.active)))
            self._report(0)
        else:
            if task.name == "sync":
                self._synchronise(0, granted)
            self._done[0].append((task, self._choose_rows(granted)))
            self._report(0)

    def _choose_rows(self, granted: Granted) -> Facts:
        """What rank 0 lets enter next; it ends the session when the closing has passed all stages."""
        if self._is_closing:
            finished = granted.task.name == "dec" and not granted.active
            self._waiting[0] = Output()
            return Facts(active=granted.active, finished=finished)
        if self.history.verdicts[0] and self._said(0) >= self.stop_after:
            self._is_closing = True
            self._waiting[0] = Output(closes=True)
        elif self._waiting[0].rows == 0 and self._has_frontier:
            self._waiting[0] = Output(self.random.randint(1, 4))
        return Facts(has_output=bool(self._waiting[0]), active=granted.active)

    def _said(self, rank: int) -> int:
        return len(self.history.verdicts[rank])

    def _execute(self, rank: int, granted: Granted) -> Facts:
        if granted.task.name == "sync":
            self._synchronise(rank, granted)
            return Facts(has_output=bool(self._waiting[rank]))
        arrived, self._arrived[rank] = self._arrived[rank], NOTHING
        if arrived.closes:
            self.history.closed.append(rank)
        if rank != self.topology.final_rank:
            self._waiting[rank] = arrived
            return Facts(has_output=bool(arrived), active=granted.active)
        is_hit = granted.task.name == "dec" and self.random.random() < self.hit_rate and self._a_hit_is_possible(granted)
        verdict = self._next_verdict(is_hit) if arrived.rows and self._num_accepted < self.num_tokens else None
        results = () if verdict is None else (RequestUpdate(REQUEST, verdict=verdict),)
        return Facts(results=results, active=granted.active)

    def _a_hit_is_possible(self, granted: Granted) -> bool:
        """Whether the rank in front of the last group holds rows in this timestep."""
        if self.topology.num_groups == 1:
            return self._has_frontier
        return self.topology.entry_ranks[-2] in granted.active

    def _next_verdict(self, hit: bool) -> Verdict:
        if self._num_accepted > 0:
            self.history.hits.append(self._next_in_flight)
        self._num_accepted, self._next_in_flight = self._num_accepted + 1, hit
        self._kept[self._num_accepted] = self.random.randint(1, self.topology.num_groups) if hit else 0
        return Verdict.of(self._num_accepted, finished="length" if self._num_accepted >= self.num_tokens else None)

    def _synchronise(self, rank: int, granted: Granted) -> None:
        for result in results_of(granted.payload):
            assert result.number == REQUEST and result.verdict is not None
            self.history.verdicts[rank].append(result.verdict)
            self.history.timesteps = granted.task.seq
            [token] = result.verdict.tokens
            keep = self._kept[token]
            distance = self.topology.num_groups - (self.topology.group_of(rank) + 1 if rank else 0)
            if rank == 0 and keep == 0:
                self._waiting[0], self._has_frontier = Output(1), True  # the accepted token is the new root
            elif distance > keep:
                self._waiting[rank] = Output(0, self._waiting[rank].closes)
                self._has_frontier = self._has_frontier and rank != 0
