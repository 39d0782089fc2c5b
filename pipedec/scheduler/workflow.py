"""The workflow as plain data: tasks, their dependencies, and the rules by which a finished task schedules the next ones.

The paper's Appendix B (Algorithm 4) as pure functions. Knows neither Redis nor processes nor tensors; the scheduler runs
these tasks, tests simulate them, and traces show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import to_builtins

from pipedec.core import UserError, Verdict
from pipedec.topology import Topology

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
        seq: the timestep; 0 and less in prefill. A window has the seq of its first timestep.
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

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that execute the task: one for compute, sender and receiver for a transfer, none if virtual."""
        return {"C": (self.target,), "T": (self.source, self.target), "V": ()}[self.kind]


@dataclass(frozen=True)
class Planned:
    """A scheduling action S(task) → after: the task is granted once every task in ``after`` is done.

    ``payload`` is a small JSON object that is delivered with the task: ``{"rows": 12}`` with a transfer and with the task that
    computes its rows, ``is_first_chunk`` with every prompt chunk and the token ids with stage 1's, ``{"verdict": …}`` with a
    sync, ``{"timesteps": 8}`` with a window.
    """

    task: Task
    after: tuple[Task, ...] = ()
    payload: Payload = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """The outcome of a task that the scheduling rules depend on, as its rank reports it.

    Attributes:
        rows_out: rows of the (pruned) output that are sent to the next rank.
        verdict: after the last prompt chunk (C,pre,n,0) the first verdict of rank n; after (C,dec,n,seq) its verdict, None if
            no further token is accepted; else None.
        finished: after a sync, whether its verdict ended the answer; after (C,dec,0,seq), whether a stop string has ended it
            and no other rank has a task any more; after (C,window,0,seq), whether the session ends with this window.
        window: after (C,window,0,seq), the number of timesteps in the next window.
        active: after a dec, the entry ranks active in this timestep, as delivered with the task.
        is_first_chunk: after a pre, whether it was the prompt's first chunk, as delivered with the task.
    """

    rows_out: int = 0
    verdict: Verdict | None = None
    finished: bool = False
    window: int = 0
    active: tuple[int, ...] = ()
    is_first_chunk: bool = False


def initial_tasks(topology: Topology, chunks: Sequence[Sequence[int]]) -> list[Planned]:
    """The tasks that start a request's workflow: case [1] of Algorithm 4, (C,pre,0,s) and (C,pre,1,s) for every prompt chunk.

    Chunk k of K has seq k - (K - 1): the last one has the paper's seq 0, earlier ones are negative.

    Args:
        chunks: token ids, which only stage 1 gets with its tasks: rank 0 has the prompt.

    Raises:
        UserError: ``chunks`` is empty.
    """
    if not chunks:
        raise UserError("a request needs at least one prompt chunk")
    planned = []
    for index, chunk in enumerate(chunks):
        seq = index - (len(chunks) - 1)
        is_first = {"is_first_chunk": index == 0}
        for rank, payload in ((0, is_first), (1, {**is_first, "token_ids": list(chunk)})):
            before = (Task.compute("pre", rank, seq - 1),) if index else ()
            planned.append(Planned(Task.compute("pre", rank, seq), before, payload))  # [1]
    return planned


def initial_windows(topology: Topology, timesteps: int) -> list[Planned]:
    """The tasks that start the workflow of a session: every rank's first window, of ``timesteps`` timesteps."""
    return [_window(rank, 1, timesteps) for rank in topology.ranks]


def post_process(task: Task, topology: Topology, facts: Facts) -> list[Planned]:
    """The tasks that a rank schedules after finishing ``task``: Algorithm 4, cases [2] to [12]; none after a transfer or end.

    A session has no tasks but windows: see ``_after_window``.
    """
    if task.kind != "C":
        return []
    if task.name == "pre":
        return _after_prefill(task, topology, facts)
    if task.name == "dec":
        return _after_decode(task, topology, facts)
    if task.name == "sync":
        return _after_sync(task, topology, facts)
    if task.name == "window":
        return _after_window(task, topology, facts)
    return []


def _after_prefill(task: Task, topology: Topology, facts: Facts) -> list[Planned]:
    """Cases [2] and [3]. Rank 0 sends nothing: stage 1 gets the prompt from the scheduler."""
    rank, seq = task.target, task.seq
    if rank == 0 or (rank == topology.final_rank and seq < 0):
        return []
    if rank == topology.final_rank:  # [3]
        if facts.verdict is None:
            raise ValueError(f"rank {rank} finished prefill without a verdict")
        # Deviation: the first token reaches the ranks by a sync like all later tokens, and those syncs schedule the tasks
        # of timestep 1 ([11], [12]).
        return _syncs(topology, seq, facts.verdict, after={i: [Task.compute("pre", i, seq)] for i in topology.ranks})
    transfer = Task.transfer(rank, rank + 1, seq)  # [2]
    payload = {"rows": facts.rows_out}
    # Deviation: a prompt may have several chunks, which a stage takes in order; the first one has no predecessor.
    earlier = () if facts.is_first_chunk else (Task.compute("pre", rank + 1, seq - 1),)
    following = Planned(
        Task.compute("pre", rank + 1, seq), (transfer, *earlier), {**payload, "is_first_chunk": facts.is_first_chunk}
    )
    return [Planned(transfer, (), payload), following]


def _after_decode(task: Task, topology: Topology, facts: Facts) -> list[Planned]:
    """Cases [4] to [10]. Deviation: rank 0 may find that the answer has ended, and (C,end,0,seq) takes the place of its dec."""
    rank, seq = task.target, task.seq
    sync = topology.has_sync(facts.active)
    planned: list[Planned] = []
    if rank != 0 and not topology.is_exit(rank):  # [4]
        transfer = Task.transfer(rank, rank + 1, seq)
        payload = {"rows": facts.rows_out}
        planned += [Planned(transfer, (), payload), Planned(Task.compute("dec", rank + 1, seq), (transfer,), payload)]
    elif rank == 0 and not sync:  # [5] [6]
        planned.append(_barrier(seq, topology.active_ranks(facts.active)))
        following = Task.compute("end", 0, seq) if facts.finished else Task.compute("dec", 0, seq + 1)
        planned.append(Planned(following, (Task.finish_all(seq),)))
    elif rank == 0:  # [5] [7]
        # Deviation: (C,dec,0,seq+1) is scheduled at rank 0's sync, because the verdict may end the answer.
        planned.append(_barrier(seq, topology.ranks))
    if not sync and not facts.finished and topology.feeds_next_group(rank):  # [8]
        planned += _send_on(rank, seq, facts.rows_out)
    if rank == topology.final_rank:  # [9]
        planned += _syncs(topology, seq, facts.verdict or Verdict(), _before_sync(topology, seq, facts.active))
    if not sync:  # [10]
        planned.append(Planned(Task.finish(rank, seq)))
    return planned


def _after_sync(task: Task, topology: Topology, facts: Facts) -> list[Planned]:
    """Cases [11] and [12]. Deviation: if the answer ends here, rank 0 gets (C,end,0,seq) after the barrier."""
    rank, seq = task.target, task.seq
    planned: list[Planned] = []
    if not facts.finished and topology.feeds_next_group(rank):  # [12]
        planned += _send_on(rank, seq, facts.rows_out)
    if rank == 0:
        if seq == 0:  # otherwise rank 0's dec has scheduled the barrier ([7]); prefill has none
            planned.append(_barrier(seq, topology.ranks))
        following = Task.compute("end", 0, seq) if facts.finished else Task.compute("dec", 0, seq + 1)
        planned.append(Planned(following, (Task.finish_all(seq),)))
    planned.append(Planned(Task.finish(rank, seq)))  # [11]
    return planned


def _after_window(task: Task, topology: Topology, facts: Facts) -> list[Planned]:
    """Not in the paper: ``window`` timesteps are granted at once, and the ranks run them without further grants.

    The grant says in which order a rank takes part in transfers between two timesteps (see ``transfers``), so no two conflict.
    Rank 0 schedules the next window of every rank; it depends on that rank's current window only, not on other ranks.
    """
    rank, seq = task.target, task.seq
    if rank != 0:
        return []
    windows = [Task.compute("window", rank, seq) for rank in topology.ranks]
    planned = [Planned(Task.finish_all(seq), tuple(windows))]
    if facts.finished:
        return [*planned, Planned(Task.compute("end", 0, seq), (Task.finish_all(seq),))]
    return planned + [_window(task.target, seq + facts.window, facts.window, task) for task in windows]


def _window(rank: int, seq: int, timesteps: int, *after: Task) -> Planned:
    return Planned(Task.compute("window", rank, seq), after, {"timesteps": timesteps})


def _barrier(seq: int, ranks: Sequence[int]) -> Planned:
    return Planned(Task.finish_all(seq), tuple(Task.finish(rank, seq) for rank in ranks))


def _send_on(rank: int, seq: int, rows: int) -> list[Planned]:
    """Send the output of timestep ``seq`` to the next group, which computes it at ``seq`` + 1. No rows, no tasks."""
    if rows == 0:
        return []
    transfer = Task.transfer(rank, rank + 1, seq)
    decode = Task.compute("dec", rank + 1, seq + 1)
    payload = {"rows": rows}
    return [Planned(transfer, (), payload), Planned(decode, (transfer, Task.finish_all(seq)), payload)]


def _before_sync(topology: Topology, seq: int, active: Sequence[int]) -> dict[int, list[Task]]:
    """The tasks that must be done before each rank prunes: its own dec, and those that still read its unpruned output."""
    before: dict[int, list[Task]] = {rank: [] for rank in topology.ranks}
    for rank in topology.active_ranks(active):
        before[rank].append(Task.compute("dec", rank, seq))
        if rank != 0 and not topology.is_exit(rank):
            before[rank] += [Task.transfer(rank, rank + 1, seq), Task.compute("dec", rank + 1, seq)]
    for entry in active:
        # Not in the paper: rows of seq - 1 that wait to be sent (a rank takes part in one transfer at a time) are sent before
        # their sender prunes by the verdict of seq. This costs nothing: the barrier awaits the receiver's dec anyway.
        before[entry - 1].append(Task.transfer(entry - 1, entry, seq - 1))
    return before


def _syncs(topology: Topology, seq: int, verdict: Verdict, after: dict[int, list[Task]]) -> list[Planned]:
    payload = {"verdict": to_builtins(verdict)}
    return [Planned(Task.compute("sync", rank, seq), tuple(after[rank]), payload) for rank in topology.ranks]
