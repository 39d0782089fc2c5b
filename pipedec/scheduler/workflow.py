"""The workflow of a session as plain data: tasks, their dependencies, and the order of the transfers between two timesteps.

Knows neither Redis nor processes nor tensors. The successors of a task are determined by ``paper`` (Algorithm 4) or, for
windows, here.

Within a group a step is passed on inside the timestep; between two timesteps each group's last stage sends to the next group's
first one, rank 0 to stage 1, and the last stage its result to rank 0. Redis grants the order (``lua/grant.lua``); a rank checks
its grant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, NamedTuple

from pipedec.core.errors import PipedecError
from pipedec.topology import Topology, rank_name

Payload = dict[str, Any]

_LETTERS = {"pre": "P", "dec": "F", "sync": "S", "window": "W", "end": "E"}


@dataclass(frozen=True)
class Task:
    """One node of the workflow graph, as in the paper's Appendix B.

    Attributes:
        kind: ``C`` compute, ``T`` transfer or ``V`` virtual. A virtual task completes as soon as it is ready.
        name: pre, dec, sync, window or end for ``C``; send for ``T``; finish for ``V``.
        source: the sender of a transfer; else equal to ``target``.
        target: the receiver of a transfer, else the task's rank; -1 for a finish of all ranks.
        seq: the timestep; 0 in prefill. A window has the seq of its first timestep.
    """

    kind: Literal["C", "T", "V"]
    name: str
    source: int
    target: int
    seq: int

    @classmethod
    def compute(cls, name: str, rank: int, seq: int) -> Task:
        return cls("C", name, rank, rank, seq)

    @classmethod
    def transfer(cls, source: int, target: int, seq: int) -> Task:
        return cls("T", "send", source, target, seq)

    @classmethod
    def finish(cls, rank: int, seq: int) -> Task:
        """(V, finish, rank, seq)."""
        return cls("V", "finish", rank, rank, seq)

    @classmethod
    def finish_all(cls, seq: int) -> Task:
        """(V, finish, all, seq): the barrier between two timesteps."""
        return cls("V", "finish", -1, -1, seq)

    @classmethod
    def parse(cls, identifier: str) -> Task:
        """The task with this ``id``. Raises ValueError if it is not a task id."""
        kind, first, second, seq = identifier.split(":")
        if kind == "T":
            return cls.transfer(int(first), int(second), int(seq))
        if kind == "C" and first in _LETTERS:
            return cls.compute(first, int(second), int(seq))
        if kind == "V" and first == "finish":
            return cls.finish_all(int(seq)) if second == "all" else cls.finish(int(second), int(seq))
        raise ValueError(f"not a task: {identifier}")

    @property
    def id(self) -> str:
        """The paper's tuple as a string: ``C:dec:2:17``, ``T:2:3:17``, ``V:finish:all:17``."""
        if self.kind == "T":
            return f"T:{self.source}:{self.target}:{self.seq}"
        return f"{self.kind}:{self.name}:{'all' if self.target < 0 else self.target}:{self.seq}"

    @property
    def label(self) -> str:
        """Short form for traces: ``2P0`` prefill, ``2F17`` forward, ``2S17`` sync, ``2W17`` window, ``2>3@17`` transfer."""
        if self.kind == "T":
            return f"{self.source}>{self.target}@{self.seq}"
        letter = "V" if self.kind == "V" else _LETTERS[self.name]
        return f"{'all' if self.target < 0 else self.target}{letter}{self.seq}"


@dataclass(frozen=True)
class Planned:
    """A scheduling action S(task) → after: the task is granted once every task in ``after`` is done.

    ``payload`` is a small JSON object that is delivered with the task: ``{"results": …}`` with a sync, ``{"timesteps": 8}``
    with a window.
    """

    task: Task
    after: tuple[Task, ...] = ()
    payload: Payload = field(default_factory=dict)


def initial_windows(topology: Topology, timesteps: int) -> list[Planned]:
    """The tasks that start the workflow of a session: every rank's first window, of ``timesteps`` timesteps."""
    return [_window(rank, 1, timesteps) for rank in topology.ranks]


def after_window(task: Task, topology: Topology, timesteps: int) -> list[Planned]:
    """The tasks that rank 0 schedules after its window: each rank's next, of ``timesteps`` timesteps; if 0, the session's end.

    The ranks run a window's timesteps without further grants. Its grant gives the order in which a rank takes part in the
    transfers between two timesteps (see ``checked_transfers``), so no two conflict. A window depends on its rank's current one.
    """
    windows = [Task.compute("window", rank, task.seq) for rank in topology.ranks]
    planned = [Planned(Task.finish_all(task.seq), tuple(windows))]
    if not timesteps:
        return [*planned, Planned(Task.compute("end", 0, task.seq), (Task.finish_all(task.seq),))]
    return planned + [_window(window.target, task.seq + timesteps, timesteps, window) for window in windows]


def _window(rank: int, seq: int, timesteps: int, *after: Task) -> Planned:
    return Planned(Task.compute("window", rank, seq), after, {"timesteps": timesteps})


class PlannedTransfer(NamedTuple):
    """A message from rank ``source`` to rank ``target`` between two timesteps."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}>{self.target}"


Phase = tuple[PlannedTransfer, ...]  # transfers that may run at the same time


def transfers_between_timesteps(topology: Topology) -> list[PlannedTransfer]:
    """All transfers: the last stage's result, on which rank 0's next message depends, then from the last group to the first."""
    ends = [0, *topology.exit_ranks]
    forward = [PlannedTransfer(source, target) for source, target in zip(ends[:-1], topology.entry_ranks, strict=True)]
    return [PlannedTransfer(topology.final_rank, 0), *reversed(forward)]


def checked_transfers(granted: Any, rank: int, topology: Topology, duplex: str) -> tuple[Phase, ...]:
    """The order of transfers that a window task grants to ``rank``.

    Args:
        granted: ``transfers`` in the task's payload, as received.
        duplex: of the links, by the rank's own settings.

    Raises:
        PipedecError: the grant does not order exactly this rank's transfers, or lets two conflict; the message names the mistake.
    """
    try:
        phases = tuple(tuple(PlannedTransfer(*pair) for pair in phase) for phase in granted)
    except TypeError:
        mistake: str | None = "it is no list of phases of transfers"
    else:
        mistake = _mistake(phases, rank, topology, duplex)
    if mistake is not None:
        raise PipedecError(f"{rank_name(rank)} refuses the order of transfers that Redis granted: {mistake}")
    return phases


def _mistake(phases: tuple[Phase, ...], rank: int, topology: Topology, duplex: str) -> str | None:
    """Why ``rank`` cannot follow this order; None if it can."""
    transfers = [transfer for phase in phases for transfer in phase]
    if not all(isinstance(end, int) for transfer in transfers for end in transfer):
        return "its transfers are not between ranks"
    own = [transfer for transfer in transfers_between_timesteps(topology) if rank in transfer]
    for transfer in transfers:
        if transfer not in own:
            return f"{transfer} is no transfer of this rank"
        if transfers.count(transfer) > 1:
            return f"{transfer} is granted twice"
    if missing := [transfer for transfer in own if transfer not in transfers]:
        return f"{missing[0]} is missing"
    for one, other in (pair for phase in phases for pair in combinations(phase, 2)):
        if conflict(one, other, duplex):
            return f"{one} and {other} at the same time, but the links are {duplex} duplex"
    if rank == 0 and transfers[0].target != 0:
        return f"{transfers[0]} before the result on which it depends"
    return None


def conflict(one: PlannedTransfer, other: PlannedTransfer, duplex: str) -> bool:
    """Whether some rank cannot take part in both at the same time."""
    if duplex == "half":
        return bool(set(one) & set(other))
    return one.source == other.source or one.target == other.target


def groups_text(topology: Topology) -> str:
    """The groups as ``lua/grant.lua`` reads them: first and last stage of each, ``1-2 3-3``."""
    return " ".join(f"{group[0]}-{group[-1]}" for group in topology.groups)
