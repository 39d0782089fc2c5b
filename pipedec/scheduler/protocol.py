"""The interface of the scheduler: the messages that ranks receive and the calls that ranks and clients make.

Two classes implement it by the same rules: ``RedisScheduler`` and its pure-Python twin ``MemoryScheduler``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipedec.messages import Event, Opening, RunDescription, opening_from_payload
from pipedec.scheduler.workflow import Payload, Planned, Task


@dataclass(frozen=True)
class Message:
    """A message in a rank's queue.

    Attributes:
        kind: ``"open"``; ``"task"``; ``"request"`` (only from ``wait_request``); ``"stop"``; ``"abort"``.
        number: the request it belongs to; -1 for stop and abort.
        task: the granted task; None unless ``kind`` is ``"task"``.
        payload: the task's payload. In the verdict of a sync task, ``finished`` is ``"cancelled"`` if the request was
            cancelled before the task was scheduled and the answer had not ended otherwise.
        active: for a dec task, the entry ranks that are active in its timestep, ascending.
        text: for a request its JSON, for an abort the reason.
        opening: the request that begins, if ``kind`` is ``"open"``; its tasks follow.
    """

    kind: str
    number: int = -1
    task: Task | None = None
    payload: Payload = field(default_factory=dict)
    active: tuple[int, ...] = ()
    text: str = ""
    opening: Opening | None = None

    @classmethod
    def from_json(cls, line: str | bytes) -> Message:
        """Parse a message as the Lua scripts write it."""
        raw = json.loads(line)
        task = Task.parse(raw["task"]) if "task" in raw else None
        payload = raw.get("payload", {})
        if raw.get("cancelled"):
            payload = cancelled_payload(payload)
        opening = opening_from_payload(raw["opening"]) if "opening" in raw else None
        active = tuple(sorted(raw.get("active", ())))
        return cls(raw["kind"], raw.get("number", -1), task, payload, active, raw.get("text", ""), opening)


def cancelled_payload(payload: Payload) -> Payload:
    """The payload of a sync task with its verdict marked as cancelled, unless the verdict ends the answer anyway."""
    verdict = payload["verdict"]
    return {**payload, "verdict": {**verdict, "finished": verdict.get("finished") or "cancelled"}}


@dataclass(frozen=True)
class GrantedTask:
    """One line of the scheduler's trace: when a task was granted and when it was reported done.

    Times are microseconds since the epoch on the scheduler's clock (Redis ``TIME``).
    """

    task: Task
    granted_us: int
    finished_us: int


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    Attributes:
        state: ``up``, ``stopping``, or ``gone`` if Redis has no state of this run.
        submitted: number of requests accepted so far.
        waiting: number of requests that rank 0 has not taken yet.
        running: number of the request being answered, or None.
        alive: ranks with a valid lease.
    """

    state: str
    submitted: int
    waiting: int
    running: int | None
    alive: tuple[int, ...]


class Scheduler(Protocol):
    """The central scheduler. One object per process. Every call may raise SchedulerLost.

    ``round_trips`` counts the commands sent to the server.
    """

    round_trips: int

    def open(self, description: RunDescription) -> None:
        """Declare the run up, so that ``submit`` is accepted.

        Raises:
            UserError: the run id is in use.
            RankLost: the run has failed.
        """

    def begin(self, request_number: int, opening: Opening, planned: Sequence[Planned]) -> None:
        """Tell every rank of a request, in a message of kind ``open``, then start its workflow with its initial tasks.

        Raises:
            UserError: another request is running.
            RankLost: the run has failed.
        """

    def finish(self, rank: int, task: Task, planned: Sequence[Planned], events: Sequence[Event] = ()) -> Message | None:
        """Report ``task`` done, schedule ``planned`` and publish ``events`` to the request's answer, in one atomic step.

        A transfer is reported by its receiver only (Algorithm 3). A repeated report changes nothing and returns the same
        message as the first.

        Returns:
            The rank's next message, or None if its queue is empty.
        """

    def wait(self, rank: int, timeout_seconds: float) -> Message | None:
        """The rank's next message, or None if none arrives within ``timeout_seconds``."""

    def submit(self, request_json: str) -> int:
        """Queue a request and return its number. Raises UserError if the run is not up, RankLost if it has failed."""

    def wait_request(self, timeout_seconds: float) -> Message | None:
        """For rank 0 between two requests: the next ``request``, ``stop`` or ``abort``, or None after ``timeout_seconds``."""

    def publish(self, request_number: int, *events: Event) -> None:
        """Append events to the answer of a request."""

    def read_answer(self, request_number: int, last: str, timeout_seconds: float) -> list[tuple[str, Event]]:
        """The events of an answer behind position ``last``, each with its position.

        Args:
            last: position of the last event already read; ``"0"`` to start at the beginning.

        Returns:
            [] if no event arrives within ``timeout_seconds``.

        Raises:
            PipedecError: what arrived is no event.
        """

    def read_answers(self, last: Mapping[int, str], timeout_seconds: float) -> list[tuple[int, str, Event]]:
        """``read_answer`` of several answers at once: the events of any of them, each with its request and position.

        Args:
            last: by request number, the position of the last event already read.
        """

    def close_answer(self, request_number: int) -> None:
        """Delete an answer that has been read."""

    def cancel(self, request_number: int) -> bool:
        """End a request: a waiting one at once, a running one at its next verdict. False if it is unknown or has ended."""

    def is_cancelled(self, request_number: int) -> bool:
        """Whether the running request ``request_number`` has been cancelled."""

    def abort(self, rank: int, message: str) -> bool:
        """Record that the run failed at ``rank``, and notify every rank and every reader of an answer.

        Only the first failure is recorded: True for it, False for later ones.
        """

    def failure(self) -> str | None:
        """The message of the first abort, or None."""

    def stop(self) -> None:
        """Ask every rank to end after the messages already in its queue, and refuse further requests."""

    def renew_lease(self, rank: int) -> None:
        """Renew the lease of ``rank`` and the time to live of the run's keys."""

    def expired_ranks(self) -> list[int]:
        """Ranks whose lease has expired."""

    def leave(self, rank: int) -> None:
        """Give up the lease of a rank that exits normally."""

    def members(self) -> list[int]:
        """Ranks that have taken a lease and have not left, expired ones included."""

    def status(self) -> RunStatus:
        """The state of the run."""

    def clock_us(self) -> int:
        """The scheduler's clock in µs since the epoch, to which ranks on all machines align their traces."""

    def trace(self) -> list[GrantedTask]:
        """The trace of the request begun last; empty unless its opening asks for one."""

    def clear(self) -> None:
        """Delete everything the run has stored."""
