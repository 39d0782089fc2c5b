"""The sequential reports to Redis that a timestep had to wait for, from the scheduler's trace.

Knows tasks and their times, not how they were executed.
"""

from __future__ import annotations

from bisect import bisect_left
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
    chain: list[Task] = []
    cause = _last_before(ordered, due, None)
    while cause is not None and cause.finished_us > begun:
        chain.append(cause.task)
        busy = _last_between(ordered, cause)
        cause = busy if busy is not None else _last_before(ordered, cause.granted_us, cause)
    return chain[::-1]


def critical_path_lengths(trace: Sequence[GrantedTask]) -> list[int]:
    """Round trips on the critical path of every timestep that ends in a verdict of the last rank."""
    synced = {line.task.seq for line in trace if line.task.name == "sync"}
    decoded = {line.task.seq for line in trace if line.task.name == "dec" and line.task.target == 0}
    return [len(critical_path(trace, seq)) for seq in sorted(decoded & synced) if seq + 1 in decoded]


def _last_before(ordered: Sequence[GrantedTask], time_us: int, but: GrantedTask | None) -> GrantedTask | None:
    """The last report that was made at ``time_us`` or before, other than ``but``."""
    index = bisect_left(ordered, time_us + 1, key=lambda line: line.finished_us) - 1
    while index >= 0 and ordered[index] is but:
        index -= 1
    return ordered[index] if index >= 0 else None


def _last_between(ordered: Sequence[GrantedTask], line: GrantedTask) -> GrantedTask | None:
    """The last report that a rank of ``line`` made after ``line`` had been granted and before it was reported itself."""
    first = bisect_left(ordered, line.granted_us + 1, key=lambda other: other.finished_us)
    last = bisect_left(ordered, line.finished_us, key=lambda other: other.finished_us)
    shared = [other for other in ordered[first:last] if set(other.task.ranks) & set(line.task.ranks)]
    return shared[-1] if shared else None
