"""The interface of the scheduler: the messages that ranks receive and the calls that ranks and clients make.

``RedisScheduler`` implements it; tests have a twin of it in Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from pipedec.messages import Activity, Event, Recovery, RunDescription, RunStats, StageStats, TokensEvent
from pipedec.scheduler.workflow import Payload, Planned, Task

WATCH_SECONDS = 5.0  # that the lease of those who watch lasts
SHOWN_BATCHES = 128  # of the live feed, that are kept
SHOWN_SECONDS = 15.0  # for which they are kept behind the last one
SESSION_TRACE = 4096  # windows of a session of which the trace is kept
TASKS_TRACE = 1_000_000  # single tasks, while a request is traced
RESTORED = "Redis had lost the run"  # the reason of a recovery


@dataclass(frozen=True)
class Granted:
    """A task that a rank may do now.

    Attributes:
        payload: see ``Planned``. A window also has ``transfers``, the order in which the rank takes part in transfers between
            two timesteps (see ``transfers.checked_transfers``).
        active: for a dec, the entry ranks that are active in its timestep, ascending.
    """

    task: Task
    payload: Payload = field(default_factory=dict)
    active: tuple[int, ...] = ()


@dataclass(frozen=True)
class Message:
    """A message in a rank's queue.

    Attributes:
        kind: ``"tasks"``; ``"request"`` (only from ``wait_request`` and ``journal``); ``"stop"``; ``"abort"``; ``"recover"``: the
            epoch has ended.
        number: the request, or the session of the tasks; -1 for stop and abort.
        tasks: what the rank does next, one after another.
        text: for a request its JSON, for an abort or the end of an epoch the reason.
        told: of a request in the journal, the token ids that its answer has.
        attempts: of a request in the journal, how many epochs have ended since it got its last token.
    """

    kind: str
    number: int = -1
    tasks: tuple[Granted, ...] = ()
    text: str = ""
    told: tuple[int, ...] = ()
    attempts: int = 0

    @classmethod
    def from_json(cls, line: str | bytes) -> Message:
        """Parse a message as the Lua scripts write it."""
        raw = json.loads(line)
        return cls(raw["kind"], raw.get("number", -1), tuple(map(_granted, raw.get("tasks", ()))), raw.get("text", ""))


def _granted(raw: dict[str, Any]) -> Granted:
    payload = raw.get("payload", {})
    if "transfers" in raw:
        payload = {**payload, "transfers": raw["transfers"]}
    return Granted(Task.parse(raw["task"]), payload, tuple(sorted(raw.get("active", ()))))


class Post(NamedTuple):
    """Events for the answer of a request.

    Attributes:
        ends: these are the last ones: the request is not running any more.
    """

    number: int
    events: tuple[Event, ...]
    ends: bool = False


class Remembered(NamedTuple):
    """What rank 0 remembers of a running request.

    Attributes:
        request: its JSON.
        events: what its answer has said, in few events.
    """

    number: int
    request: str
    events: tuple[Event, ...]


class Shown(NamedTuple):
    """A batch of the live feed.

    Attributes:
        number: counts the batches, from 1.
        frames: JSON, a list of objects.
    """

    position: str
    number: int
    frames: str


@dataclass(frozen=True)
class Taken:
    """What rank 0 learns of the queue.

    Attributes:
        requests: messages of kind ``request``, sooner ones first. They are running until ``complete``.
        cancelled: all running requests that have been cancelled, with every call until ``complete``.
        stopping: the run was asked to stop.
        watcher: names who has begun last to read the live feed; empty if nobody reads it.
    """

    requests: list[Message]
    cancelled: list[int]
    stopping: bool
    watcher: str = ""


def tokens_told(events: Iterable[Event]) -> tuple[int, ...]:
    """The token ids of an answer, of which a part may have been written twice."""
    told: list[int] = []
    for event in events:
        if isinstance(event, TokensEvent):
            told[event.index :] = event.token_ids
    return tuple(told)


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
        running: numbers of the requests that rank 0 has taken and that have not ended, ascending.
        alive: ranks with a valid lease.
        expired: ranks whose lease has expired.
        failure: the message of the first abort; None if the run has not failed.
        stats: what rank 0 has told last; None before it has.
        stages: what the stages have told last, those that have; in their order.
        epoch: of the run.
        serving: the last epoch whose ranks have served.
        recovers: whether somebody replaces ranks that are lost.
        recoveries: the last ones, in order.
        num_recoveries: how many there were.
    """

    state: str
    submitted: int
    waiting: int
    running: tuple[int, ...]
    alive: tuple[int, ...]
    expired: tuple[int, ...] = ()
    failure: str | None = None
    stats: RunStats | None = None
    stages: tuple[StageStats, ...] = ()
    epoch: int = 0
    serving: int = 0
    recovers: bool = False
    recoveries: tuple[Recovery, ...] = ()
    num_recoveries: int = 0

    @property
    def is_recovering(self) -> bool:
        """Whether the ranks have yet to serve in the present epoch."""
        return self.epoch != self.serving


@dataclass(frozen=True)
class Supervision:
    """What a supervisor decides by.

    Attributes:
        epoch: of the run; None if Redis does not know the run.
        state: see ``RunStatus``.
        members: ranks that have taken a lease in this epoch.
        expired: those of them whose lease has expired.
        activities: what members do, by rank.
        suspects: what ranks say that cannot go on, by rank.
        ends: why ranks end, by rank, as far as they have said so.
        places: the node of each rank that has been given to one.
        recoveries: the last ones, in order.
        lost_nodes: those whose lease has expired.
    """

    epoch: int | None
    state: str
    failure: str | None
    members: tuple[int, ...]
    expired: tuple[int, ...]
    activities: Mapping[int, Activity]
    suspects: Mapping[int, str]
    ends: Mapping[int, str]
    places: Mapping[int, str]
    recoveries: tuple[Recovery, ...]
    lost_nodes: tuple[str, ...]


class Scheduler(Protocol):
    """The central scheduler. One object per process. Every call may raise SchedulerLost.

    The calls of ranks and supervisors carry the epoch in which their process takes part. If the run is in another one, those that
    would change something raise EpochEnded and change nothing.

    Attributes:
        round_trips: the commands sent to the server.
    """

    round_trips: int

    @property
    def run_id(self) -> str:
        """The name of the run."""

    @property
    def epoch(self) -> int:
        """The epoch in which this process takes part."""

    def current_epoch(self) -> int | None:
        """The epoch of the run; None if it is not open (yet, or any more)."""

    def enter(self, epoch: int) -> None:
        """Take part in ``epoch`` from now on."""

    def recover(self, lost: Sequence[int], reason: str, places: Mapping[int, str] = MappingProxyType({})) -> int:
        """End the epoch in which this process takes part, if it is still the run's; returns the run's epoch.

        All ranks get a message of kind ``recover``; requests and their answers stay.

        Args:
            lost: ranks whose processes are replaced.
            places: the nodes that take them over, by rank.

        Raises:
            RankLost: the run has failed.
            SchedulerLost: it is no longer stored.
        """

    def journal(self) -> list[Message]:
        """For rank 0, at the beginning of an epoch: all running requests, in the order of their numbers."""

    def restore(self, description: RunDescription, duplex: str, submitted: int, remembered: Sequence[Remembered]) -> int:
        """For rank 0: write back a run that Redis has lost, in the epoch behind this process's; returns the run's epoch.

        Nothing happens if Redis knows the run. Lost ranks of a run that is restored are replaced.

        Args:
            submitted: the number of the next request: greater than that of any before, of which clients may still hope to hear.
            remembered: the running requests.
        """

    def suspect(self, rank: int, message: str) -> None:
        """Tell the supervisors that ``rank`` cannot go on, because another one does not answer."""

    def note_end(self, rank: int, message: str) -> None:
        """Tell the supervisors why the process of ``rank`` ends."""

    def open(self, description: RunDescription, duplex: str = "full", recovers: bool = False) -> None:
        """Declare the run up, so that ``submit`` is accepted; in a later epoch, that its ranks serve again.

        Args:
            description: for clients; its limits say when ``submit`` refuses further requests.
            duplex: of the links between the ranks, ``half`` or ``full``; decides the order of transfers that windows grant.
            recovers: whether somebody replaces ranks that are lost.

        Raises:
            UserError: the run id is in use.
            RankLost: the run has failed.
        """

    def begin_session(self, session: int, planned: Sequence[Planned], trace_lines: int) -> None:
        """Start the workflow of a session with its initial tasks. It knows nothing of the requests that run in it.

        Args:
            session: its number; no two of a run may be the same.
            trace_lines: how many lines of its trace are kept.

        Raises:
            UserError: another workflow is running, or the run is not up.
            RankLost: the run has failed.
        """

    def report(
        self,
        rank: int,
        done: Sequence[Task],
        planned: Sequence[Planned],
        timeout_seconds: float = 0.0,
        trace_lines: int | None = None,
    ) -> Message | None:
        """Report tasks done and schedule ``planned``, in one atomic step; then ``wait``, in the same round trip.

        A transfer is reported by its receiver only (Algorithm 3). A repeated report changes nothing.

        Args:
            trace_lines: how many lines of the trace are kept from now on; None for as many as before.
        """

    def wait(self, rank: int, timeout_seconds: float) -> Message | None:
        """The rank's next message, or None if none arrives within ``timeout_seconds``."""

    def submit(self, request_json: str, priority: int = 0, owner: str = "", operation: str = "") -> int:
        """Queue a request and return its number.

        Args:
            priority: requests of a lower one are taken first, those of the same one in the order of their numbers.
            owner: whose lease the request needs until its answer is closed; this renews it. Empty for none.
            operation: an id, by which a call that is repeated, because its reply was lost, is known. Empty for none.

        Raises:
            QueueFull: as many requests run and wait as the run allows.
            UserError: it is not up.
            RankLost: it has failed.
        """

    def renew_owner(self, owner: str) -> bool:
        """Renew the lease of an owner of requests. False if it had none: then its requests have ended, or will."""

    def release_owner(self, owner: str) -> None:
        """Give up the lease of an owner: requests that it has left end."""

    def end_orphans(self) -> list[int]:
        """For rank 0: cancel the requests of owners without a lease, and close their answers. Returns the numbers."""

    def take(self, limit: int) -> Taken:
        """For rank 0, without waiting: at most ``limit`` requests, in the order of (priority, number), and what was cancelled.

        Raises:
            RankLost: the run has failed.
        """

    def wait_request(self, timeout_seconds: float) -> Message | None:
        """For rank 0 when nothing runs: the next ``request``, ``stop`` or ``abort``, or None after ``timeout_seconds``.

        Raises:
            RankLost: the run has failed.
        """

    def publish(self, request_number: int, *events: Event) -> None:
        """Append events to the answer of a request."""

    def complete(self, request_number: int, *events: Event) -> None:
        """Append the last events to the answer of a request, which is not running any more, in one atomic step."""

    def publish_all(self, posts: Sequence[Post], stats: RunStats | None = None) -> None:
        """Append events to the answers of several requests, in order, in one atomic step.

        Args:
            stats: for ``status``; None if there is nothing new.
        """

    def tell(self, stats: StageStats) -> None:
        """Let ``status`` know of a stage's counters, when its lease is renewed next. Sends nothing itself."""

    def watch(self, begins: bool = False) -> None:
        """For readers of the live feed: rank 0 publishes it for ``WATCH_SECONDS`` more.

        Args:
            begins: the reader knows nothing yet, so that rank 0 has to tell what runs.
        """

    def live_position(self) -> str:
        """The position behind which what follows in the live feed comes."""

    def show(self, frames: Sequence[str]) -> None:
        """Rank 0: add frames, each a JSON object, to the live feed. Only the last batches are kept, not for long."""

    def read_live(self, last: str, timeout_seconds: float) -> list[Shown]:
        """Wait for batches of the live feed.

        Args:
            last: position of the last batch known.

        Returns:
            what there is behind it; nothing after ``timeout_seconds``.
        """

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
        """Delete an answer that has been read, or that nobody will read: nothing is written to it any more."""

    def cancel(self, request_number: int) -> bool:
        """End a request: a waiting one at once, a running one when rank 0 learns of it (``Taken``). False if it is unknown or has
        ended.
        """

    def abort(self, rank: int, message: str) -> bool:
        """Record that the run failed at ``rank``, and notify every rank and every reader of an answer.

        Only the first failure is recorded: True for it, False for later ones.
        """

    def failure(self) -> str | None:
        """The message of the first abort, or None."""

    def stop(self) -> None:
        """Ask every rank to end after the messages already in its queue, and refuse further requests."""

    def renew_lease(self, rank: int, activity: Activity | None = None) -> None:
        """Renew the lease of ``rank`` and the time to live of the run's keys; tell the supervisors what it does."""

    def expired_ranks(self) -> list[int]:
        """Ranks whose lease has expired."""

    def leave(self, rank: int) -> None:
        """Give up the lease of a rank that exits normally."""

    def members(self) -> list[int]:
        """Ranks that have taken a lease and have not left, expired ones included."""

    def status(self) -> RunStatus:
        """The state of the run, and all that a waiting client needs to know of it, in one round trip."""

    def clock_us(self) -> int:
        """The scheduler's clock in µs since the epoch, to which ranks on all machines align their traces."""

    def trace(self) -> list[GrantedTask]:
        """The trace of the session begun last, as far as it is kept."""

    def clear(self) -> None:
        """Delete everything the run has stored."""
