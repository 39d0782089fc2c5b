"""The scheduler's pure-Python twin: the rules of the Lua scripts, in one process, for tests and simulation.

One test suite runs on both and compares the tasks they grant. All times are from the process's own clocks.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from msgspec.structs import replace

from pipedec.core import EpochEnded, QueueFull, RankLost, SchedulerLost, UserError
from pipedec.messages import (
    AbortEvent,
    ActivityReport,
    CancelledEvent,
    Event,
    Recovery,
    RunDescription,
    RunStats,
    StageStats,
    TokensEvent,
)
from pipedec.scheduler.protocol import (
    RESTORED,
    SHOWN_BATCHES,
    WATCH_SECONDS,
    FrameBatch,
    Granted,
    GrantedTask,
    Post,
    RankMessage,
    Remembered,
    RunStatus,
    Taken,
    published_token_ids,
)
from pipedec.scheduler.workflow import Payload, Planned, Task
from pipedec.topology import Topology, of_rank
from support.transfer_order import transfers_of


@dataclass
class _Graph:
    """The task graph of a session, as ``lua/graph.lua`` keeps it in Redis."""

    number: int
    trace_lines: int
    topology: Topology
    duplex: str
    running: bool = True
    waiting: dict[Task, Payload] = field(default_factory=dict)
    unmet: dict[Task, int] = field(default_factory=dict)
    dependents: dict[Task, list[Task]] = field(default_factory=dict)
    granted: dict[Task, int] = field(default_factory=dict)
    done: set[Task] = field(default_factory=set)
    active: dict[int, list[int]] = field(default_factory=dict)
    trace: deque[GrantedTask] = field(default_factory=deque)
    ready: list[tuple[Task, Payload]] = field(default_factory=list)
    messages: dict[int, list[Granted]] = field(default_factory=dict)  # by rank, of the present call
    promised: Counter[Task] = field(default_factory=Counter)  # dependencies granted in front of the task, in the present call

    def add(self, planned: Planned) -> None:
        task, payload = planned.task, planned.payload
        unmet = [before for before in planned.after if before not in self.done]
        for before in unmet:
            self.dependents.setdefault(before, []).append(task)
        if task.name == "dec" and task.target in self.topology.entry_ranks:
            self.active.setdefault(task.seq, []).append(task.target)
        if unmet:
            self.waiting[task], self.unmet[task] = payload, len(unmet)
        else:
            self.ready.append((task, payload))

    def complete(self, task: Task) -> None:
        self.done.add(task)
        for other in self.dependents.pop(task, []):
            if other in self.unmet:  # it may be granted already
                self.unmet[other] -= 1
                if self.unmet[other] == 0:
                    self._make_ready(other)
        if task == Task.finish_all(task.seq):
            self.done = {other for other in self.done if other.seq >= task.seq}
            self.active.pop(task.seq, None)

    def report(self, task: Task) -> None:
        granted_us = self.granted.pop(task)
        if self.trace_lines and granted_us:
            self.trace.append(GrantedTask(task, granted_us, _now_us()))
        while len(self.trace) > self.trace_lines:
            self.trace.popleft()

    def release(self) -> dict[int, list[Granted]]:
        """What each rank is granted."""
        while self.ready:
            computes, transfers = list[tuple[Task, Payload]](), list[tuple[Task, Payload]]()
            for task, payload in self.ready:  # which grows
                if task.kind == "V":
                    self.complete(task)
                else:
                    (transfers if task.kind == "T" else computes).append((task, payload))
            self.ready = []
            self._grant_transfers(transfers)
            for task, payload in computes:
                self._grant(task, payload)
        messages, self.messages = self.messages, {}
        self.promised.clear()
        return messages

    def _make_ready(self, task: Task) -> None:
        del self.unmet[task]
        self.ready.append((task, self.waiting.pop(task)))

    def _grant(self, task: Task, payload: Payload) -> None:
        self.granted[task] = _now_us() if self.trace_lines else 0
        granted = self._granted(task, payload)
        for rank in task.ranks:
            self.messages.setdefault(rank, []).append(granted)
        for other in self.dependents.get(task, []):
            if task.target in other.ranks:
                self.promised[other] += 1
                if self.unmet.get(other) == self.promised[other]:
                    self._make_ready(other)

    def _granted(self, task: Task, payload: Payload) -> Granted:
        if task.name == "dec":
            return Granted(task, payload, tuple(sorted(self.active.get(task.seq, ()))))
        if task.name == "window":
            phases = transfers_of(task.target, self.topology, self.duplex)
            payload = {**payload, "transfers": [[list(transfer) for transfer in phase] for phase in phases]}
        return Granted(task, payload)

    def _grant_transfers(self, pending: list[tuple[Task, Payload]]) -> None:
        """Algorithm 2, lines 9 to 17, until nothing is pending."""
        while pending:
            busy, waiting = set[int](), []
            for task, payload in pending:
                if busy.intersection(task.ranks):
                    waiting.append((task, payload))
                else:
                    busy.update(task.ranks)
                    self._grant(task, payload)
            pending = waiting


class MemoryScheduler:
    """Ranks, clients and supervisors in this process. Nothing blocks: ``wait`` returns None at once if the queue is empty."""

    def __init__(self, topology: Topology, lease_seconds: float = 5.0) -> None:
        self.topology = topology
        self.lease_seconds = lease_seconds
        self.round_trips = 0
        self.clear()

    def clear(self) -> None:
        self.graph: _Graph | None = None
        self._queues: dict[int, deque[RankMessage]] = {rank: deque() for rank in self.topology.ranks}
        self._waiting: dict[int, int] = {}  # priorities of the requests that wait, by number
        self._operations: dict[str, int] = {}  # numbers by id
        self._requests: dict[int, str] = {}  # JSON of those that wait or run
        self._attempts: Counter[int] = Counter()
        self._entered, self._epoch, self._serving, self._recovers = 0, 0, 0, False
        self._recoveries: list[Recovery] = []
        self._suspects: dict[int, str] = {}
        self._ends: dict[int, str] = {}
        self._running: set[int] = set()
        self._unread: set[int] = set()
        self._answers: defaultdict[int, list[Event]] = defaultdict(list)
        self._cancelled: set[int] = set()
        self._leases: dict[int, float] = {}
        self._state: str | None = None
        self._failure: str | None = None
        self._submitted = 0
        self._duplex, self._max_running, self._max_waiting = "full", 0, 0
        self._stats: RunStats | None = None
        self._told: dict[int, StageStats] = {}  # by rank, not written yet
        self._stages: dict[int, StageStats] = {}
        self._watcher, self._watched_until, self._num_shown = "", 0.0, 0
        self._shown: deque[FrameBatch] = deque(maxlen=SHOWN_BATCHES)
        self._owners: dict[int, str] = {}  # by number, of requests whose answers are not closed
        self._owner_leases: dict[str, float] = {}

    def current_epoch(self) -> int | None:
        return None if self._state is None else self._epoch

    @property
    def run_id(self) -> str:
        return "memory"

    @property
    def epoch(self) -> int:
        return self._entered

    def enter(self, epoch: int) -> None:
        if epoch != self._entered:
            self._queues = {rank: deque() for rank in self.topology.ranks}
        self._entered = epoch

    def recover(
        self, lost: Sequence[int], reason: str, places: Mapping[int, str] = MappingProxyType({}), counts: bool = True
    ) -> int:
        self._check_failure()
        if self._state is None:
            raise SchedulerLost("its keys were deleted")
        if self._epoch != self.epoch:
            return self._epoch
        self._epoch += 1
        self._recoveries.append(Recovery(self._epoch, tuple(lost), reason, _now_us()))
        if counts:
            self._attempts.update(self._running)
        self.graph = None
        for told in (self._leases, self._suspects, self._ends):
            told.clear()
        for queue in self._queues.values():
            queue.clear()
            queue.append(RankMessage("recover", text=reason))
        return self._epoch

    def journal(self) -> list[RankMessage]:
        return [self._journaled(number) for number in sorted(self._running)]

    def _journaled(self, number: int) -> RankMessage:
        token_ids = published_token_ids(self._answers[number])
        return RankMessage(
            "request", number, text=self._requests[number], output_token_ids=token_ids, attempts=self._attempts[number]
        )

    def restore(self, description: RunDescription, duplex: str, submitted: int, remembered: Sequence[Remembered]) -> int:
        if self._state is None:
            self._state, self._epoch, self._serving, self._recovers = "up", self.epoch + 1, self.epoch, True
            self._max_running, self._max_waiting = (
                description.settings.limits.max_num_seqs,
                description.settings.limits.max_waiting,
            )
            self._submitted, self._duplex = submitted, duplex
            self._recoveries.append(Recovery(self._epoch, (), RESTORED, _now_us()))
            for number, request, events in remembered:
                self._running.add(number)
                self._requests[number] = request
                self._answers[number] = list(events)
        return self._epoch

    def suspect(self, rank: int, message: str) -> None:
        self._check_epoch()
        self._suspects.setdefault(rank, message)

    def note_end(self, rank: int, message: str) -> None:
        self._check_epoch()
        self._ends.setdefault(rank, message)

    def open(self, description: RunDescription, duplex: str = "full", recovers: bool = False) -> None:
        self._check_epoch()
        self._check_failure()
        if self._state is not None and not self.epoch:
            raise UserError("this run id is already in use")
        self._state, self._duplex, self._recovers, self._serving = self._state or "up", duplex, recovers, self.epoch
        if self._recoveries:
            self._recoveries[-1] = replace(self._recoveries[-1], served_us=_now_us())
        if self._state == "stopping":  # it was asked to stop in an epoch that has ended
            for queue in self._queues.values():
                queue.append(RankMessage("stop"))
        self._max_running, self._max_waiting = description.settings.limits.max_num_seqs, description.settings.limits.max_waiting

    def begin_session(self, session: int, planned: Sequence[Planned], trace_lines: int) -> None:
        self._check_epoch()
        self._check_failure()
        if self.graph is not None and self.graph.running:
            raise UserError(f"workflow {self.graph.number} is still running")
        if self._state is None:
            raise UserError("the run is not up")
        self.graph = _Graph(session, trace_lines, self.topology, self._duplex)
        for plan in planned:
            self.graph.add(plan)
        self._push_tasks(self.graph)

    def report(
        self,
        rank: int,
        done: Sequence[Task],
        planned: Sequence[Planned],
        timeout_seconds: float = 0.0,
        trace_lines: int | None = None,
    ) -> RankMessage | None:
        self._check_epoch()
        graph = self.graph
        if graph is None:
            raise SchedulerLost("the workflow is no longer stored")
        if all(task in graph.granted for task in done):
            graph.trace_lines = graph.trace_lines if trace_lines is None else trace_lines
            for task in done:
                graph.report(task)
            for plan in planned:
                graph.add(plan)
            for task in done:
                graph.complete(task)
            self._push_tasks(graph)
            if done[-1].name == "end":
                graph.running = False
                graph.done.clear()
        return self.wait(rank, timeout_seconds) if timeout_seconds > 0 else None

    def _push_tasks(self, graph: _Graph) -> None:
        for rank, granted in graph.release().items():
            self._push(rank, RankMessage("tasks", graph.number, tuple(granted)))

    def wait(self, rank: int, timeout_seconds: float) -> RankMessage | None:
        queue = self._queues[rank]
        return queue.popleft() if queue else None

    def submit(self, request_json: str, priority: int = 0, operation: str = "", owner: str = "") -> int:
        if operation in self._operations:
            return self._operations[operation]
        self._check_failure()
        if self._state != "up":
            raise UserError("the run is stopping" if self._state == "stopping" else "the run is not up")
        if len(self._running) + len(self._waiting) >= self._max_running + self._max_waiting:
            raise QueueFull(
                f"the cluster is full: {len(self._running)} requests are running and {len(self._waiting)} are waiting "
                f"(--max-waiting {self._max_waiting}); submit the request again when some of them have been answered"
            )
        self._waiting[self._submitted], self._requests[self._submitted] = priority, request_json
        if owner:
            self._owners[self._submitted] = owner
            self.renew_owner(owner)
        self._submitted += 1
        if operation:
            self._operations[operation] = self._submitted - 1
        return self._submitted - 1

    def renew_owner(self, owner: str) -> bool:
        lived = self._owner_leases.get(owner, 0.0) > time.monotonic()
        self._owner_leases[owner] = time.monotonic() + self.lease_seconds
        return lived

    def release_owner(self, owner: str) -> None:
        self._owner_leases.pop(owner, None)

    def end_orphans(self) -> list[int]:
        self._check_epoch()
        now = time.monotonic()
        orphans = sorted(number for number, owner in self._owners.items() if self._owner_leases.get(owner, 0.0) <= now)
        for number in orphans:
            self.cancel(number)
            self.close_answer(number)
        return orphans

    def take(self, limit: int) -> Taken:
        self._check_epoch()
        self._check_failure()
        if self._state is None:
            raise SchedulerLost("its keys were deleted")
        if self._state != "stopping":  # the requests of a stopping run are taken to be refused
            limit = min(limit, self._max_running - len(self._running))
        numbers = sorted(self._waiting, key=lambda number: (self._waiting[number], number))[: max(limit, 0)]
        requests = [RankMessage("request", number, text=self._requests[number]) for number in numbers]
        for number in numbers:
            del self._waiting[number]
        self._running.update(numbers)
        return Taken(
            requests,
            sorted(self._cancelled),
            self._state == "stopping",
            self._watcher if time.monotonic() < self._watched_until else "",
        )

    def wait_request(self, timeout_seconds: float) -> RankMessage | None:
        message = self.wait(0, timeout_seconds)
        if message is None and (requests := self.take(1).requests):
            return requests[0]
        return message

    def publish(self, request_number: int, *events: Event) -> None:
        self.publish_all([Post(request_number, events)])

    def complete(self, request_number: int, *events: Event) -> None:
        self.publish_all([Post(request_number, events, ends=True)])

    def publish_all(self, posts: Sequence[Post], stats: RunStats | None = None) -> None:
        self._check_epoch()
        self._stats = stats or self._stats
        for post in posts:
            for event in post.events if post.number < 0 or post.number in self._running else ():
                self._append(post.number, event)
                if isinstance(event, TokensEvent) and event.token_ids:
                    self._attempts.pop(post.number, None)
            if post.ends:
                for numbers in (self._running, self._cancelled, self._unread):
                    numbers.discard(post.number)
                self._requests.pop(post.number, None)

    def publish_stats(self, stats: StageStats) -> None:
        self._told[stats.rank] = stats

    def _append(self, number: int, event: Event) -> None:
        if number not in self._unread:
            self._answers[number].append(event)

    def watch(self, begins: bool = False) -> None:
        if begins or time.monotonic() > self._watched_until:
            self._watcher = secrets.token_hex(8)
        self._watched_until = time.monotonic() + WATCH_SECONDS

    def live_position(self) -> str:
        return str(self._num_shown)

    def show(self, frames: Sequence[str]) -> None:
        self._num_shown += 1
        self._shown.append(FrameBatch(str(self._num_shown), self._num_shown, f"[{','.join(frames)}]"))

    def read_live(self, last: str, timeout_seconds: float) -> list[FrameBatch]:
        return [shown for shown in self._shown if shown.number > int(last)]

    def read_answer(self, request_number: int, last: str, timeout_seconds: float) -> list[tuple[str, Event]]:
        return [(position, event) for _, position, event in self.read_answers({request_number: last}, timeout_seconds)]

    def read_answers(self, last: Mapping[int, str], timeout_seconds: float) -> list[tuple[int, str, Event]]:
        return [
            (number, str(index + 1), event)
            for number, position in last.items()
            for index, event in enumerate(self._answers.get(number, []))
            if index >= int(position)
        ]

    def close_answer(self, request_number: int) -> None:
        self._answers.pop(request_number, None)
        self._owners.pop(request_number, None)
        if request_number in self._running or request_number in self._waiting:
            self._unread.add(request_number)

    def cancel(self, request_number: int) -> bool:
        if request_number in self._waiting:
            del self._waiting[request_number], self._requests[request_number]
            self._append(request_number, CancelledEvent())
            self._unread.discard(request_number)
            return True
        if request_number in self._running:
            self._cancelled.add(request_number)
            return True
        return False

    def abort(self, rank: int, message: str) -> bool:
        self._check_epoch()
        if self._failure is not None:
            return False
        self._failure = of_rank(rank, message)
        for queue in self._queues.values():
            queue.appendleft(RankMessage("abort", text=self._failure))
        for number in [*self._running, *self._waiting]:
            self._append(number, AbortEvent(self._failure))
        return True

    def failure(self) -> str | None:
        return self._failure

    def stop(self) -> None:
        if self._state != "stopping":
            self._state = "stopping"
            for queue in self._queues.values():
                queue.append(RankMessage("stop"))

    def renew_lease(self, rank: int, activity: ActivityReport | None = None) -> None:
        self._check_epoch()
        self._leases[rank] = time.monotonic() + self.lease_seconds
        if self._state is not None and rank in self._told:
            self._stages[rank] = self._told[rank]

    def expired_ranks(self) -> list[int]:
        return sorted(rank for rank, end in self._leases.items() if end <= time.monotonic())

    def leave(self, rank: int) -> None:
        self._check_epoch()
        self._leases.pop(rank, None)

    def members(self) -> list[int]:
        return sorted(self._leases)

    def status(self) -> RunStatus:
        expired, recoveries = self.expired_ranks(), tuple(self._recoveries)
        return RunStatus(
            state=self._state or "gone",
            submitted=self._submitted,
            waiting=len(self._waiting),
            running=tuple(sorted(self._running)),
            alive=tuple(sorted(set(self._leases) - set(expired))),
            expired=tuple(expired),
            failure=self._failure,
            stats=self._stats,
            stages=tuple(self._stages[rank] for rank in sorted(self._stages)),
            epoch=self._epoch,
            serving=self._serving,
            recovers=self._recovers,
            recoveries=recoveries,
            num_recoveries=len(recoveries),
        )

    def clock_us(self) -> int:
        return _now_us()

    def trace(self) -> list[GrantedTask]:
        return list(self.graph.trace) if self.graph is not None else []

    def _push(self, rank: int, message: RankMessage) -> None:
        self._queues[rank].append(message)

    def _check_epoch(self) -> None:
        if self._epoch != self.epoch:
            raise EpochEnded(f"the run is in epoch {self._epoch}, not in {self.epoch}")

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise RankLost(self._failure)


def _now_us() -> int:
    return time.time_ns() // 1000
