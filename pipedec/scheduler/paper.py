"""The tasks to schedule after a task is done, when Redis grants every task: Algorithm 4 of the PipeDec paper (Appendices A and B;
Algorithm 2 is in ``lua/graph.lua``, Algorithm 3 in ``engine/stage_loop.py``). Pure functions; numbers in brackets are its cases.

Deviations, so that a rank calls Redis at most twice in a timestep: transfers between two timesteps wait for the barrier, and [2]
and [4] are scheduled ahead, with the first task of a group. So consecutive tasks of a rank are granted at once: it receives and
sends between timesteps, computes, and sends on to the next stage of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import convert, to_builtins

from pipedec.core.stage_message import RequestUpdate
from pipedec.core.verdict import Verdict
from pipedec.scheduler.workflow import Payload, Planned, Task
from pipedec.topology import Topology


@dataclass(frozen=True)
class Facts:
    """The outcome of a finished task, as its rank reports it.

    Attributes:
        has_output: whether, after pruning, the rank has a message for the next one: rows, or updates that open or close requests.
        results: after a pre or dec of rank n, its results for the rows that it has computed.
        active: after a dec, the entry ranks active in this timestep, as granted with the task.
        finished: after a sync or dec of rank 0, whether the session ends.
    """

    has_output: bool = False
    results: tuple[RequestUpdate, ...] = ()
    active: tuple[int, ...] = ()
    finished: bool = False


def results_of(payload: Payload) -> tuple[RequestUpdate, ...]:
    """The results in a sync's payload: verdicts to replay; for rank 0 all results of the last stage."""
    return convert(payload["results"], tuple[RequestUpdate, ...])


def initial_tasks(topology: Topology) -> list[Planned]:
    """The tasks that start a session: [1], and [2] for every stage.

    Deviation: rank 0 has the prompts, and sends them to stage 1 by a transfer, like all rows, with the seq before prefill (-1).
    """
    prompts = Task.transfer(0, 1, -1)
    planned = [Planned(Task.compute("pre", 0, 0)), Planned(prompts), Planned(Task.compute("pre", 1, 0), (prompts,))]  # [1]
    for rank in range(1, topology.num_stages):
        planned += _pass_on("pre", rank, 0)  # [2]
    return planned


def post_process(task: Task, topology: Topology, facts: Facts) -> list[Planned]:
    """The tasks that a rank schedules after finishing ``task``; none after a transfer or the session's end."""
    if task.name == "pre" and task.target == topology.final_rank:  # [3]
        # Deviation: the first tokens reach the ranks by a sync like all later ones, and those syncs schedule the tasks of
        # timestep 1 ([11], [12]).
        return _syncs(task.seq, facts.results, {rank: [Task.compute("pre", rank, task.seq)] for rank in topology.ranks})
    if task.name == "dec":
        return _after_decode(task, topology, facts)
    if task.name == "sync":
        return _after_sync(task, topology, facts)
    return []


def _after_decode(task: Task, topology: Topology, facts: Facts) -> list[Planned]:
    """Cases [5] to [10]; [4] is scheduled by ``_send_on``."""
    rank, seq = task.target, task.seq
    sync = topology.has_sync(facts.active)
    planned: list[Planned] = []
    if rank == 0 and not sync:  # [5] [6]
        planned += [_barrier(seq, topology.active_ranks(facts.active)), _next_of_rank_zero(seq, facts)]
    elif rank == 0:  # [7]
        planned.append(_barrier(seq, topology.ranks))  # [5] follows at rank 0's sync, whose verdicts may end the session
    if not sync and facts.has_output and topology.feeds_next_group(rank):  # [8]
        planned += _send_on(topology, rank, seq)
    if rank == topology.final_rank:  # [9]
        computed = {other: [Task.compute("dec", other, seq)] for other in topology.active_ranks(facts.active)}
        planned += _syncs(seq, facts.results, {other: computed.get(other, []) for other in topology.ranks})
    if not sync:  # [10]
        planned.append(Planned(Task.finish(rank, seq)))
    return planned


def _after_sync(task: Task, topology: Topology, facts: Facts) -> list[Planned]:
    """Cases [11] and [12]."""
    rank, seq = task.target, task.seq
    planned: list[Planned] = []
    if facts.has_output and topology.feeds_next_group(rank):  # [12]
        planned += _send_on(topology, rank, seq)
    if rank == 0:
        if seq == 0:  # otherwise rank 0's dec has scheduled the barrier ([7]); prefill has none
            planned.append(_barrier(seq, topology.ranks))
        planned.append(_next_of_rank_zero(seq, facts))
    planned.append(Planned(Task.finish(rank, seq)))  # [11]
    return planned


def _next_of_rank_zero(seq: int, facts: Facts) -> Planned:
    """[5]. Deviation: if the session ends, (C,end,0,seq) takes the place of the next dec."""
    following = Task.compute("end", 0, seq) if facts.finished else Task.compute("dec", 0, seq + 1)
    return Planned(following, (Task.finish_all(seq),))


def _barrier(seq: int, ranks: Sequence[int]) -> Planned:
    return Planned(Task.finish_all(seq), tuple(Task.finish(rank, seq) for rank in ranks))


def _send_on(topology: Topology, rank: int, seq: int) -> list[Planned]:
    """Send the output of timestep ``seq`` to the next group, whose stages compute it in ``seq`` + 1 one after another."""
    barrier, transfer = Task.finish_all(seq), Task.transfer(rank, rank + 1, seq)
    planned = [Planned(transfer, (barrier,)), Planned(Task.compute("dec", rank + 1, seq + 1), (transfer, barrier))]
    for stage in topology.groups[topology.group_of(rank + 1)][:-1]:
        planned += _pass_on("dec", stage, seq + 1)  # [4]
    return planned


def _pass_on(name: str, stage: int, seq: int) -> list[Planned]:
    """Send the output of a stage's task to the next stage, which computes it in the same timestep."""
    transfer = Task.transfer(stage, stage + 1, seq)
    return [Planned(transfer, (Task.compute(name, stage, seq),)), Planned(Task.compute(name, stage + 1, seq), (transfer,))]


def _syncs(seq: int, results: Sequence[RequestUpdate], after: dict[int, list[Task]]) -> list[Planned]:
    """A sync for every rank, to replay the accepted tokens. Only rank 0 receives the other results; it passes on which answers
    have ended.
    """
    verdicts = ((result.number, result.verdict) for result in results if result.verdict is not None)
    accepted = [RequestUpdate(number, verdict=Verdict(verdict.accepted)) for number, verdict in verdicts if verdict.tokens]
    for_stages, for_rank_zero = ({"results": to_builtins(part)} for part in (accepted, results))
    return [Planned(Task.compute("sync", rank, seq), tuple(after[rank]), for_stages if rank else for_rank_zero) for rank in after]
