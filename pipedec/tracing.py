"""Records the tasks of every rank with their times, and writes them as a Chrome/Perfetto trace.

Owns the event and the file format. Does not know how the events of other ranks are collected. All times are microseconds of the
clock of Redis, to which the ranks align theirs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SCHEDULER_TRACK = -1


class TraceEvent(NamedTuple):
    """One task on the track of ``rank`` (SCHEDULER_TRACK for the scheduler). Times are µs since the epoch."""

    rank: int
    label: str
    category: str
    start_us: int
    end_us: int


@dataclass
class Tracer:
    """Records one rank's events while ``enabled``. ``clock_offset_us`` is added to this machine's clock."""

    rank: int
    clock_offset_us: int = 0
    enabled: bool = False
    events: list[TraceEvent] = field(default_factory=list)

    def add(self, label: str, category: str, began: float, ended: float) -> None:
        """Record an event. Times are seconds of ``time.perf_counter``."""
        offset_us = self.clock_offset_us + time.time_ns() // 1000 - round(time.perf_counter() * 1e6)
        start_us, end_us = round(began * 1e6) + offset_us, round(ended * 1e6) + offset_us
        self.events.append(TraceEvent(self.rank, label, category, start_us, end_us))


def chrome_trace(events: Iterable[TraceEvent], track_names: dict[int, str]) -> dict[str, object]:
    """The trace as a JSON document for chrome://tracing and Perfetto. Time 0 is the first event."""
    ordered = sorted(events, key=lambda event: event.start_us)
    origin = ordered[0].start_us if ordered else 0
    names = [
        {"ph": "M", "pid": 0, "tid": rank + 1, "name": name, "args": {key: value}}
        for rank, title in track_names.items()
        for name, key, value in (("thread_name", "name", title), ("thread_sort_index", "sort_index", rank + 1))
    ]
    tasks = [
        {
            "ph": "X", "pid": 0, "tid": event.rank + 1, "name": event.label, "cat": event.category,
            "ts": event.start_us - origin, "dur": max(1, event.end_us - event.start_us),
        }
        for event in ordered
    ]  # fmt: skip
    return {"traceEvents": [*names, *tasks], "displayTimeUnit": "ms"}


def write_trace(path: Path, events: Iterable[TraceEvent], track_names: dict[int, str]) -> None:
    """Write ``chrome_trace`` to ``path``. Raises OSError."""
    path.write_text(json.dumps(chrome_trace(events, track_names)) + "\n", encoding="utf-8")
