"""The records that the scheduler exchanges with ranks, clients and supervisors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipedec.messages.events import Event, TokensEvent
from pipedec.messages.stats import ActivityReport, Recovery, RunStats, StageStats
from pipedec.scheduler.workflow import Payload, Task

WATCH_SECONDS = 5.0  # duration of a viewer's lease
SHOWN_BATCHES = 128  # batches of the live feed that Redis keeps
SHOWN_SECONDS = 15.0  # the live feed is kept so long after its last batch
SESSION_TRACE = 4096  # windows of a session whose trace is kept
TASKS_TRACE = 1_000_000  # single tasks whose trace is kept, while a request is traced


@dataclass(frozen=True)
class Granted:
    """A task that a rank may execute now.

    Attributes:
        payload: see ``Planned``. A window also has ``transfers``, the order in which the rank takes part in transfers between
            two timesteps (see ``workflow.checked_transfers``).
        active: for a dec, the entry ranks that are active in its timestep, ascending.
    """

    task: Task
    payload: Payload = field(default_factory=dict)
    active: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankMessage:
    """A message in a rank's queue.

    Attributes:
        kind: ``"tasks"``; ``"request"`` (only from ``wait_request`` and ``journal``); ``"stop"``; ``"abort"``; ``"recover"``: the
            epoch has ended.
        number: the request, or the session of the tasks; -1 for stop and abort.
        tasks: the tasks that the rank executes next, one after another.
        text: for a request its JSON, for an abort or the end of an epoch the reason.
        output_token_ids: of a request in the journal, the token ids of its answer so far.
        attempts: of a request in the journal, how many epochs ranks or links have ended since it got its last token.
        losses: the same since it was submitted, or has passed a trial.
    """

    kind: str
    number: int = -1
    tasks: tuple[Granted, ...] = ()
    text: str = ""
    output_token_ids: tuple[int, ...] = ()
    attempts: int = 0
    losses: int = 0

    @classmethod
    def from_json(cls, line: str | bytes) -> RankMessage:
        """Parse a message as the Lua scripts write it."""
        raw = json.loads(line)
        return cls(raw["kind"], raw.get("number", -1), tuple(map(_granted, raw.get("tasks", ()))), raw.get("text", ""))


def _granted(raw: dict[str, Any]) -> Granted:
    payload = raw.get("payload", {})
    if "transfers" in raw:
        payload = {**payload, "transfers": raw["transfers"]}
    return Granted(Task.parse(raw["task"]), payload, tuple(sorted(raw.get("active", ()))))


class Post(NamedTuple):
    """Events for the answer of a request; ``ends`` if they are the last ones."""

    number: int
    events: tuple[Event, ...]
    ends: bool = False


class FrameBatch(NamedTuple):
    """A batch of the live feed.

    Attributes:
        number: of the batch, from 1.
        frames: a JSON list of objects.
    """

    position: str
    number: int
    frames: str


@dataclass(frozen=True)
class Taken:
    """The requests and commands that rank 0 takes from the queue.

    Attributes:
        requests: messages of kind ``request``, in order. They count as running until their last events are published.
        cancelled: all running requests that have been cancelled; each is repeated until it ends.
        stopping: whether the run was asked to stop.
        watcher: the id of the newest reader of the live feed; empty if there is none.
    """

    requests: list[RankMessage]
    cancelled: list[int]
    stopping: bool
    watcher: str = ""


def published_token_ids(events: Iterable[Event]) -> tuple[int, ...]:
    """The token ids of an answer, parts of which may have been written twice."""
    token_ids: list[int] = []
    for event in events:
        if isinstance(event, TokensEvent):
            token_ids[event.index :] = event.token_ids
    return tuple(token_ids)


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
        stats: rank 0's latest report; None before the first.
        stages: the latest report of each stage that has reported, in their order.
        epoch: of the run.
        serving: the last epoch whose ranks have served.
        recovers: whether lost ranks are replaced.
        recoveries: the latest ones, in order.
        num_recoveries: their total number.
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
        """Whether the ranks do not serve yet in the present epoch."""
        return self.epoch != self.serving


@dataclass(frozen=True)
class Supervision:
    """The state of a run on which a supervisor bases its decisions.

    Attributes:
        epoch: of the run; None if Redis does not know the run.
        state: see ``RunStatus``.
        members: ranks that have taken a lease in this epoch.
        expired: members whose lease has expired.
        activities: those of members, by rank.
        suspects: reports of ranks that cannot continue, by rank.
        ends: why ranks have ended, by rank, as far as they have reported it.
        places: by rank, the node to which it was assigned.
        recoveries: the latest ones, in order.
        tried: the request that rank 0 serves alone, because ranks were lost while it was running; None without one.
        lost_nodes: nodes whose lease has expired.
    """

    epoch: int | None
    state: str
    failure: str | None
    members: tuple[int, ...]
    expired: tuple[int, ...]
    activities: Mapping[int, ActivityReport]
    suspects: Mapping[int, str]
    ends: Mapping[int, str]
    places: Mapping[int, str]
    recoveries: tuple[Recovery, ...]
    tried: int | None
    lost_nodes: tuple[str, ...]
