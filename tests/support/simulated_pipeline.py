"""Drives a scheduler through whole answers without models: ranks are small state machines, run in random order.

Replaces the rank loops in tests of the scheduling rules, and shows the workflow of one answer. Tokens are only counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import convert

from pipedec.core import Opening, SamplingParams, Verdict
from pipedec.scheduler.protocol import Message, Scheduler
from pipedec.scheduler.workflow import Facts, Planned, Task, initial_tasks, post_process
from pipedec.topology import Topology

Observer = Callable[[], None]


@dataclass
class History:
    """What happened, in order.

    Attributes:
        received: (rank, message) in the order of delivery.
        finished: tasks in the order in which they were reported done (a transfer once, by its receiver).
        planned: every scheduling action, in the order of the reports that made it.
        verdicts: for each rank, the verdicts of its sync tasks.
        hits: for each decoded token, whether its row was in flight at the previous verdict (as ``Metrics`` counts hits).
    """

    received: list[tuple[int, Message]] = field(default_factory=list)
    finished: list[Task] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    verdicts: dict[int, list[Verdict]] = field(default_factory=dict)
    hits: list[bool] = field(default_factory=list)

    @property
    def timesteps(self) -> int:
        return max(task.seq for task in self.finished)


class SimulatedPipeline:
    """All ranks of one request. Rows are only counted: a hit keeps the rows of the last few exit ranks, a miss keeps none.

    Each move executes one granted task of one rank, chosen by ``random_source``; a transfer needs both of its ranks.

    Args:
        num_tokens: length of the answer.
        hit_rate: probability that a verdict is a hit, where one is possible.
        repeat_rate: probability that a task is reported twice, as after a lost reply.
        stop_after: number of tokens after which rank 0 finds a stop string; the other ranks go on until the pipeline is empty.

    Raises:
        AssertionError: no rank can move before the answer has ended (a deadlock).
    """

    def __init__(
        self,
        topology: Topology,
        scheduler: Scheduler,
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
        self.stop_after = stop_after
        self.kept: dict[int, int] = {}  # for each token, the number of exit ranks, counted from the last, that keep their rows
        self.stopped = False
        self.history = History(verdicts={rank: [] for rank in topology.ranks})
        self.current: dict[int, Message | None] = dict.fromkeys(topology.ranks)
        self.rows = dict.fromkeys(topology.ranks, 0)
        self.num_accepted = 0
        self.next_in_flight = False
        self.frontier_alive = True
        self.ended = False

    def run(self, request_number: int = 0, num_chunks: int = 1, trace: bool = False, observe: Observer | None = None) -> History:
        """Run one request from prefill to its end task. ``observe`` is called after every move."""
        planned = initial_tasks(self.topology, [[index] for index in range(num_chunks)])
        self.history.planned += planned
        self.scheduler.begin(request_number, Opening(num_chunks, SamplingParams(), trace=trace), planned)
        while not self.ended:
            self._collect()
            movable = [rank for rank in self.topology.ranks if self._can_move(rank)]
            assert movable, f"deadlock: {self.current}"
            self._move(self.random.choice(movable))
            if observe is not None:
                observe()
        return self.history

    def _collect(self) -> None:
        for rank in self.topology.ranks:
            while self.current[rank] is None and (message := self.scheduler.wait(rank, 0)) is not None:
                self._receive(rank, message)

    def _receive(self, rank: int, message: Message | None) -> None:
        if message is not None:
            self.history.received.append((rank, message))
        self.current[rank] = None if message is not None and message.kind == "open" else message

    def _can_move(self, rank: int) -> bool:
        """Whether ``rank`` has a task it can execute. A transfer counts as the receiver's, once both ranks have it."""
        message = self.current[rank]
        if message is None or message.task is None:
            return False
        if message.task.kind == "C":
            return True
        other = self.current[message.task.source]
        return rank == message.task.target and other is not None and other.task == message.task

    def _move(self, rank: int) -> None:
        message = self.current[rank]
        assert message is not None and message.task is not None
        task = message.task
        if task.kind == "T":
            self.current[task.source] = None
            planned: list[Planned] = []
        else:
            planned = post_process(task, self.topology, self._execute(rank, task, message))
        self.ended = task.name == "end"
        self.history.finished.append(task)
        self.history.planned += planned
        reply = self.scheduler.finish(rank, task, planned)
        if self.random.random() < self.repeat_rate:  # the reply was lost: the rank reports again
            reply = self.scheduler.finish(rank, task, planned)
        self._receive(rank, reply)

    def _execute(self, rank: int, task: Task, message: Message) -> Facts:
        if task.name == "pre":
            verdict = self._next_verdict(hit=False) if rank == self.topology.final_rank and task.seq == 0 else None
            return Facts(rows_out=1, verdict=verdict, is_first_chunk=message.payload["is_first_chunk"])
        if task.name == "dec":
            return self._decode(rank, message)
        if task.name == "sync":
            return self._synchronise(rank, convert(message.payload["verdict"], Verdict))
        return Facts()

    def _decode(self, rank: int, message: Message) -> Facts:
        rows = message.payload["rows"] if rank else (self.random.randint(1, 4) if self.frontier_alive else 0)
        if self.stopped and rank == 0:
            return Facts(active=message.active, finished=not message.active)
        self.rows[rank] = rows
        verdict = None
        if rank == self.topology.final_rank:
            verdict = self._next_verdict(hit=self.random.random() < self.hit_rate and self._a_hit_is_possible())
        return Facts(rows_out=rows, verdict=verdict, active=message.active)

    def _a_hit_is_possible(self) -> bool:
        """Whether the rank in front of the last group holds rows in this timestep."""
        if self.topology.entry_ranks[-1] - 1 == 0:  # rank 0, which chooses its rows only at its dec task
            return self.frontier_alive
        message = self.current[self.topology.final_rank]
        return message is not None and self.topology.entry_ranks[-2] in message.active

    def _next_verdict(self, hit: bool) -> Verdict:
        if self.num_accepted > 0:
            self.history.hits.append(self.next_in_flight)
        self.num_accepted, self.next_in_flight = self.num_accepted + 1, hit
        self.kept[self.num_accepted] = self.random.randint(1, self.topology.num_groups) if hit else 0
        return Verdict.of(self.num_accepted, finished="length" if self.num_accepted >= self.num_tokens else None)

    def _synchronise(self, rank: int, verdict: Verdict) -> Facts:
        self.history.verdicts[rank].append(verdict)
        [token] = verdict.tokens
        keep = self.kept[token]
        distance = self.topology.num_groups - (self.topology.group_of(rank) + 1 if rank else 0)
        self.stopped = self.stopped or token == self.stop_after
        if rank == 0 and keep == 0:
            self.rows[0], self.frontier_alive = 1, True  # the accepted token is the new root
        elif distance > keep:
            self.rows[rank] = 0
            self.frontier_alive = self.frontier_alive and rank != 0
        if rank == 0 and self.stopped:
            self.rows[0], self.frontier_alive = 0, False
        return Facts(rows_out=self.rows[rank], finished=verdict.finished is not None)
