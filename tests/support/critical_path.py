"""The critical path of a timestep in a trace of the scheduler: the sequential reports to Redis that it waited for."""

from __future__ import annotations

from collections.abc import Sequence

from pipedec.scheduler import GrantedTask, Task


def critical_path(trace: Sequence[GrantedTask], seq: int) -> list[Task]:
    """The chain of tasks between the grant of (C,dec,0,``seq``) and the grant of (C,dec,0,``seq`` + 1), in order.

    A task is granted by the script call that reports the last task it depended on, and Redis's clock does not advance inside a
    script, so the time of a grant identifies its cause. The walk goes backwards from rank 0's next dec: the cause of a task is
    the latest report among (a) the one that granted it and (b) those that its ranks still had to make after that, because a
    rank runs one task at a time. Every task of the chain is one report to Redis that had to precede the next one, so the
    chain's length is the number of round trips on the critical path.

    Raises:
        KeyError: the trace has no dec of rank 0 at ``seq`` or at ``seq`` + 1.
    """
    decodes = {line.task.seq: line for line in trace if line.task.name == "dec" and line.task.target == 0}
    begun, due = decodes[seq].granted_us, decodes[seq + 1].granted_us
    ordered = sorted(trace, key=lambda line: line.finished_us)
    causes = [line for line in ordered if line.finished_us <= due]
    chain: list[Task] = []
    while causes and causes[-1].finished_us > begun:
        cause = causes[-1]
        chain.append(cause.task)
        granting = [line for line in ordered if line.finished_us <= cause.granted_us and line is not cause]
        meanwhile = [line for line in ordered if cause.granted_us < line.finished_us < cause.finished_us]
        own = [line for line in meanwhile if set(line.task.ranks) & set(cause.task.ranks)]
        causes = own or granting
    return chain[::-1]


def critical_path_lengths(trace: Sequence[GrantedTask]) -> list[int]:
    """Round trips on the critical path of every timestep that ends in a verdict of the last rank."""
    synced = {line.task.seq for line in trace if line.task.name == "sync"}
    decoded = {line.task.seq for line in trace if line.task.name == "dec" and line.task.target == 0}
    return [len(critical_path(trace, seq)) for seq in sorted(decoded & synced) if seq + 1 in decoded]
