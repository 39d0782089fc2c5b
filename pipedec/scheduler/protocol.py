"""What a rank sees of the scheduler: the messages it gets and the calls it may make.

Two classes keep this protocol by the same rules: ``RedisScheduler`` and its pure-Python twin ``MemoryScheduler``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipedec.scheduler.workflow import Payload, Planned, Task

Event = dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One thing for a rank to do.

    Attributes:
        kind: ``"task"``; ``"request"`` (only from ``wait_request``); ``"stop"``; ``"abort"``.
        number: the request it belongs to, -1 for stop and abort.
        task: the granted task, if ``kind`` is ``"task"``.
        payload: the task's payload. In a sync's verdict, ``finished`` is ``"cancelled"`` if the user cancelled in time.
        active: with a dec task, the entry ranks active in its seq, ascending.
        text: the request's JSON, or why the run was aborted.
    """

    kind: str
    number: int = -1
    task: Task | None = None
    payload: Payload = field(default_factory=dict)
    active: tuple[int, ...] = ()
    text: str = ""

    @classmethod
    def from_json(cls, line: str | bytes) -> Message:
        """Reads what the Lua scripts push into a queue."""
        raw = json.loads(line)
        task = Task.parse(raw["task"]) if "task" in raw else None
        payload = raw.get("payload", {})
        if raw.get("cancelled"):
            payload = cancelled_payload(payload)
        return cls(raw["kind"], raw.get("number", -1), task, payload, tuple(sorted(raw.get("active", ()))), raw.get("text", ""))


def cancelled_payload(payload: Payload) -> Payload:
    """The payload of a sync whose request was cancelled before rank n scheduled it; a verdict that ended it anyway stays."""
    verdict = payload["verdict"]
    return {**payload, "verdict": {**verdict, "finished": verdict.get("finished") or "cancelled"}}


@dataclass(frozen=True)
class GrantedTask:
    """One line of the scheduler's own trace: when a task was granted and when it was reported done.

    Times are microseconds of the scheduler's clock (Redis TIME, since the epoch).
    """

    task: Task
    granted_us: int
    finished_us: int


@dataclass(frozen=True)
class RunStatus:
    """A run at a glance.

    Attributes:
        state: ``up``, ``stopping``, or ``gone`` when nothing is stored about it (any more).
        submitted, waiting: requests taken so far, and those of them that have not been begun.
        running: the number of the request being answered, or None.
        alive: ranks that hold a lease.
    """

    state: str
    submitted: int
    waiting: int
    running: int | None
    alive: tuple[int, ...]


class Scheduler(Protocol):
    """The central scheduler. One object per process; every call may raise ``SchedulerLost``."""

    round_trips: int

    def open(self, description: dict[str, Any]) -> None:
        """Declares the run up: from now on ``submit`` is accepted. Raises UserError if the run id is in use.

        ``description`` tells clients what they need to know of the run; ``groups`` (lists of ranks) at least.
        """

    def begin(self, request_number: int, planned: Sequence[Planned], trace: bool = False) -> None:
        """Opens the workflow of a request with its initial tasks. Raises UserError if another one is running."""

    def finish(self, rank: int, task: Task, planned: Sequence[Planned], events: Sequence[Event] = ()) -> Message | None:
        """Reports ``task`` done, schedules ``planned``, publishes ``events`` to the request's answer, all at once.

        A transfer is finished by its receiver only (Algorithm 3). Returns the rank's next message if there is one by
        then. Reported twice, it has effect once and gives the same message again.
        """

    def wait(self, rank: int, timeout_seconds: float) -> Message | None:
        """The rank's next message, or None after ``timeout_seconds``."""

    def submit(self, request_json: str) -> int:
        """Queues a request; returns its number. Raises UserError if the run is not up, RankLost if it has failed."""

    def wait_request(self, timeout_seconds: float) -> Message | None:
        """For rank 0 between two requests: the next ``request``, ``stop`` or ``abort``, or None after the time."""

    def publish(self, request_number: int, *events: Event) -> None:
        """Appends events to the answer of a request."""

    def read_answer(self, request_number: int, last: str, timeout_seconds: float) -> list[tuple[str, Event]]:
        """Events of an answer after position ``last`` (``"0"`` for all), each with its position; [] after the time."""

    def close_answer(self, request_number: int) -> None:
        """Deletes an answer that has been read."""

    def cancel(self, request_number: int) -> bool:
        """Ends a request at its next verdict (at once if it still waits); False if there is no such request any more."""

    def is_cancelled(self, request_number: int) -> bool:
        """Whether the running request ``request_number`` has been cancelled."""

    def abort(self, rank: int, message: str) -> bool:
        """Records that the run failed at ``rank`` and tells every rank and reader. The first failure wins (True)."""

    def failure(self) -> str | None:
        """The message of the first abort, or None."""

    def stop(self) -> None:
        """Tells every rank to end, after what is already in its queue, and refuses further requests."""

    def renew_lease(self, rank: int) -> None:
        """Says that ``rank`` is alive for another lease time, and keeps the run's keys for another minute."""

    def expired_ranks(self) -> list[int]:
        """Ranks that have held a lease and let it run out."""

    def leave(self, rank: int) -> None:
        """Gives up the lease of a rank that ends in order."""

    def members(self) -> list[int]:
        """Ranks that have taken a lease and not left."""

    def status(self) -> RunStatus:
        """The run at a glance."""

    def clock_us(self) -> int:
        """The scheduler's clock, µs since the epoch: the one that traces of several machines are aligned to."""

    def trace(self) -> list[GrantedTask]:
        """What was granted and finished in the request begun last, if it was begun with ``trace``."""

    def clear(self) -> None:
        """Deletes everything the run has stored."""
