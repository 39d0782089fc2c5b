"""Where the time of a timestep goes, from the traces of all ranks.

Knows tasks and their times, not emulation or what the ranks computed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipedec.topology import Topology
from pipedec.tracing import SCHEDULER_TRACK, TraceEvent

PHASES = ("compute", "wait", "transfer", "sync", "scheduler")

_Span = tuple[int, int]


@dataclass
class _Timestep:
    """The tasks of one timestep, in µs: forwards by rank, then the other phases."""

    forwards: dict[int, _Span]
    transfers: list[_Span]
    syncs: list[_Span]


def breakdown(events: Iterable[TraceEvent], num_stages: int) -> dict[str, float] | None:
    """Milliseconds per timestep by phase, mean over the stages and timesteps of one traced answer; None if it has none.

    ``compute`` is a stage's own forward, ``transfer`` its sending and receiving, ``sync`` the replay of verdicts, ``scheduler``
    reports and grants, and ``wait`` the rest: for the draft, for slower stages, for rows to compute.
    """
    ranked = [event for event in events if event.rank != SCHEDULER_TRACK]
    if any(_is_window(event) for event in ranked):
        return _of_windows(ranked, num_stages)
    timesteps = _timesteps(ranked)
    numbers = [number for number in sorted(timesteps) if number + 1 in timesteps and timesteps[number].forwards]
    parts = [_phases(timesteps[number], _start(timesteps[number + 1]), num_stages) for number in numbers]
    if not parts:
        return None
    return {name: fmean(part[name] for part in parts) / 1000 for name in PHASES}


def slowest_compute_ms(events: Iterable[TraceEvent], topology: Topology) -> float | None:
    """The forwards of the slowest group in a timestep, in ms: mean over the timesteps of one traced answer; None if it has none.

    The stages of a group compute one after another, the groups at the same time.
    """
    spent: dict[int, list[int]] = defaultdict(lambda: [0] * topology.num_groups)
    for event in events:
        number = _number(event)
        if event.rank > 0 and "F" in event.label and number is not None and number > 0:
            spent[number][topology.group_of(event.rank)] += event.end_us - event.start_us
    return fmean(map(max, spent.values())) / 1000 if spent else None


def _is_window(event: TraceEvent) -> bool:
    return "W" in event.label


def _of_windows(events: Sequence[TraceEvent], num_stages: int) -> dict[str, float] | None:
    """Inside windows ranks run at their own pace, so each stage is timed by itself, from its first window to its last.

    Outside of windows it waits for the scheduler.
    """
    last = max(event for event in map(_number, events) if event is not None)
    parts = []
    for rank in range(1, num_stages + 1):
        own = [event for event in events if event.rank == rank and (_number(event) or 0) > 0]
        windows = [(event.start_us, event.end_us) for event in own if _is_window(event)]
        windows = windows or [(min(event.start_us for event in own), max(event.end_us for event in own))]  # it goes on
        low, high = min(start for start, _ in windows), max(stop for _, stop in windows)
        spent = {
            name: sum(event.end_us - event.start_us for event in own if letter in event.label)
            for name, letter in (("compute", "F"), ("transfer", ">"), ("sync", "S"))
        }
        scheduler = high - low - _covered(windows, low, high)
        parts.append({**spent, "scheduler": scheduler, "wait": high - low - scheduler - sum(spent.values())})
    return {name: fmean(part[name] for part in parts) / last / 1000 for name in PHASES}


def _number(event: TraceEvent) -> int | None:
    """The timestep of a task."""
    found = re.search(r"(-?\d+)$", event.label)
    return int(found[1]) if found else None


def _timesteps(events: Iterable[TraceEvent]) -> dict[int, _Timestep]:
    found: dict[int, _Timestep] = defaultdict(lambda: _Timestep({}, [], []))
    for event in events:
        span = (event.start_us, event.end_us)
        if ">" in event.label:
            found[int(event.label.split("@")[1])].transfers.append(span)
        elif "F" in event.label:
            rank, number = event.label.split("F")
            found[int(number)].forwards[int(rank)] = span
        elif "S" in event.label:
            found[int(event.label.split("S")[1])].syncs.append(span)
    return {number: timestep for number, timestep in found.items() if number > 0 and timestep.forwards}


def _start(timestep: _Timestep) -> int:
    return min(start for start, _ in timestep.forwards.values())


def _phases(timestep: _Timestep, end: int, num_stages: int) -> dict[str, float]:
    """The phases of a timestep whose tasks were granted one by one: from its first forward to the first of the next timestep.

    A stage waits from the end of its forward to the end of the last one, the draft's included; a stage without rows waits all
    that time. After that, time counts as ``transfer`` while a transfer runs, else as ``sync`` while a rank replays the verdict.
    A late grant of a forward counts as ``scheduler``.
    """
    start = _start(timestep)
    computed = max(stop for _, stop in timestep.forwards.values())
    stages = [span for rank, span in timestep.forwards.items() if rank > 0]
    idle = (num_stages - len(stages)) * (computed - start)
    transfer = _covered(timestep.transfers, computed, end)
    either = _covered([*timestep.transfers, *timestep.syncs], computed, end)
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
