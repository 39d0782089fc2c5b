"""Resources of every process of a cluster, and their growth from fault to fault. Does not know the work of the processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import psutil

from pipedec.bench.record import Row

FIGURES = ("rss_mib", "descriptors", "threads")
_GROWTH = {"rss_mib": 1.0, "descriptors": 0.5, "threads": 0.5, "keys": 0.5, "processes": 0.2}  # most per fault
_SETTLING = 2  # faults that a process lives through before its growth counts
_EXPIRING_KEYS = 32.0  # queues of epochs that ended within the last minute
_FEWEST = 8  # faults, summed over processes, below which growth is not judged


def processes_usage(processes: Iterable[psutil.Process], ranks: Mapping[int, int]) -> list[Row]:
    """Measure all ``processes`` that are still there, the supervisor first; ``ranks`` are process ids by rank.

    Their roles are ``rank N``, ``supervisor``, ``redis`` or ``helper``; ``rss_mib`` is resident memory.
    """
    by_pid = {pid: f"rank {rank}" for rank, pid in ranks.items()}
    rows = []
    for number, process in enumerate(processes):
        try:
            with process.oneshot():
                name = "supervisor" if number == 0 else by_pid.get(process.pid) or _server_name(process)
                memory = round(process.memory_info().rss / (1 << 20), 2)
                figures = {"rss_mib": memory, "descriptors": process.num_fds(), "threads": process.num_threads()}
                rows.append(Row(role=name, pid=process.pid, **figures))
        except psutil.Error:
            continue
    return rows


def _server_name(process: psutil.Process) -> str:
    return "redis" if {"redis", "valkey"} & set(process.name().split("-")) else "helper"


def growth(trials: Sequence[Row], kv_bytes: int) -> Row:
    """Growth per fault: of processes while they live, which may be many after one another, and of the keys in Redis.

    None where there were too few faults. A rank's pool of ``kv_bytes`` becomes resident as it is used: not counted as growth.
    """
    lives: dict[int, list[Row]] = {}
    for trial in trials:
        for one in trial["usage"]:
            lives.setdefault(one["pid"], []).append(one)
    settled = [life[_SETTLING:] for life in lives.values()]
    found: Row = {}
    for name in FIGURES:
        discount = kv_bytes / (1 << 20) if name == "rss_mib" else 0.0
        found[name] = _per_fault([[one[name] for one in life] for life in settled], discount)
    for name in ("keys", "processes"):
        discount = _EXPIRING_KEYS if name == "keys" else 0.0
        found[name] = _per_fault([[trial[name] for trial in trials if trial[name] is not None][_SETTLING:]], discount)
    return found


def leaks(grown: Row) -> list[str]:
    """A line for each figure of ``growth`` that is more than chance."""
    return [
        f"{name} grow by {value:.2f} per fault (at most {_GROWTH[name]:g})"
        for name, value in grown.items()
        if value is not None and value > _GROWTH[name]
    ]


def _per_fault(series: Sequence[Sequence[float]], discount: float = 0.0) -> float | None:
    """Mean growth from one number to the next, over all series; single leaps do not count, nor ``discount`` in each series."""
    steps = [after - before for one in series for before, after in pairwise(one)]
    if len(steps) < _FEWEST:
        return None
    total = sum(max(_median_ends(one) - discount, 0.0) for one in series if len(one) > 1)
    return total / len(steps)


def _median_ends(numbers: Sequence[float]) -> float:
    """From the beginning of a series to its end, by the medians of up to three numbers there."""
    ends = min(3, len(numbers) // 2)
    return median(numbers[-ends:]) - median(numbers[:ends])
