"""Where the time of a timestep goes, from the traces of all ranks.

Knows tasks and their times, not emulation or what the ranks computed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from pipedec.tracing import SCHEDULER_TRACK, TraceEvent

PHASES = ("compute", "wait", "transfer", "sync", "scheduler")

_Span = tuple[int, int]  # in µs


def breakdown(events: Iterable[TraceEvent], num_stages: int) -> dict[str, float] | None:
    """Milliseconds per timestep by phase, mean over the stages and timesteps of one traced answer; None if it has none.

    ``compute`` is a stage's own forward, ``transfer`` its sending and receiving, ``sync`` the replay of verdicts, ``scheduler``
    reports and grants, and ``wait`` the rest: for the draft, for slower stages, for rows to compute.
    """
    ranked = [event for event in events if event.rank != SCHEDULER_TRACK]
    if _spans(ranked, "W"):
        return _of_windows(ranked, num_stages)
    timesteps: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in ranked:
        timesteps[_number(event)].append(event)
    starts = {
        number: min(start for start, _ in forwards)
        for number, own in timesteps.items()
        if number > 0 and (forwards := _spans(own, "F"))
    }
    parts = [
        _phases(timesteps[number], start, starts[number + 1], num_stages)
        for number, start in sorted(starts.items())
        if number + 1 in starts
    ]
    return {name: fmean(part[name] for part in parts) / 1000 for name in PHASES} if parts else None


def _number(event: TraceEvent) -> int:
    """The timestep of a task; 0 or below for prefill and tasks of no timestep."""
    found = re.search(r"(-?\d+)$", event.label)
    return int(found[1]) if found else 0


def _spans(events: Iterable[TraceEvent], letter: str) -> list[_Span]:
    """Start and end of the tasks whose labels contain ``letter``."""
    return [(event.start_us, event.end_us) for event in events if letter in event.label]


def _of_windows(events: Sequence[TraceEvent], num_stages: int) -> dict[str, float]:
    """Inside windows ranks run at their own pace: each stage is timed by itself. Outside it waits for the scheduler."""
    last = max(map(_number, events))
    parts = []
    for rank in range(1, num_stages + 1):
        own = [event for event in events if event.rank == rank and _number(event) > 0]
        windows = _spans(own, "W")
        windows = windows or [(min(event.start_us for event in own), max(event.end_us for event in own))]  # it goes on
        low, high = min(start for start, _ in windows), max(stop for _, stop in windows)
        spent = {
            name: sum(stop - start for start, stop in _spans(own, letter))
            for name, letter in (("compute", "F"), ("transfer", ">"), ("sync", "S"))
        }
        scheduler = high - low - _covered(windows, low, high)
        parts.append({**spent, "scheduler": scheduler, "wait": high - low - scheduler - sum(spent.values())})
    return {name: fmean(part[name] for part in parts) / last / 1000 for name in PHASES}


def _phases(events: Sequence[TraceEvent], start: int, end: int, num_stages: int) -> dict[str, float]:
    """The phases of a timestep whose tasks were granted one by one: from its first forward to the first of the next timestep.

    A stage waits from the end of its forward to the end of the last one, the draft's included; a stage without rows waits all
    that time. After that, time counts as ``transfer`` while a transfer runs, else as ``sync`` while a rank replays the verdict.
    A late grant of a forward counts as ``scheduler``.
    """
    computed = max(stop for _, stop in _spans(events, "F"))
    stages = _spans([event for event in events if event.rank > 0], "F")
    idle = (num_stages - len(stages)) * (computed - start)
    transfers = _spans(events, ">")
    transfer = _covered(transfers, computed, end)
    either = _covered([*transfers, *_spans(events, "S")], computed, end)
    late = sum(begin - start for begin, _ in stages) / num_stages
    return {
        "compute": sum(stop - begin for begin, stop in stages) / num_stages,
        "wait": (sum(computed - stop for _, stop in stages) + idle) / num_stages,
        "transfer": transfer,
        "sync": either - transfer,
        "scheduler": max(0, end - computed) - either + late,
    }


def _covered(spans: Sequence[_Span], low: int, high: int) -> int:
    """The length of the part of [low, high] that the spans cover."""
    total, reached = 0, low
    for start, stop in sorted(spans):
        begin, stop = max(start, reached), min(stop, high)
        if stop > begin:
            total, reached = total + stop - begin, stop
    return total
