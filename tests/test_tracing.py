"""Recording tasks, and the trace file."""

import json
from pathlib import Path

import pytest

from pipedec.tracing import SCHEDULER_TRACK, TraceEvent, Tracer, chrome_trace, write_trace

EVENTS = [
    TraceEvent(2, "2F17", "dec", 5_000_400, 5_000_900),
    TraceEvent(0, "0F17", "dec", 5_000_000, 5_000_300),
    TraceEvent(SCHEDULER_TRACK, "2>3@17", "T", 5_000_900, 5_000_900),
]
NAMES = {0: "rank 0: draft", 2: "rank 2: stage 2", SCHEDULER_TRACK: "scheduler"}


def test_times_are_on_the_schedulers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second ago on this machine, whose clock shows 100 s, is 99 s and the scheduler's lead."""
    monkeypatch.setattr("time.time_ns", lambda: 100_000_000_000)
    monkeypatch.setattr("time.perf_counter", lambda: 7.0)
    tracer = Tracer(3, clock_offset_us=-400)
    tracer.add("3>4@2", "transfer", 6.0, 6.0025)
    assert tracer.events == [(3, "3>4@2", "transfer", 98_999_600, 99_002_100)]


def test_chrome_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, iter(EVENTS), NAMES)
    document = json.loads(path.read_text(encoding="utf-8"))
    tasks = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert tasks == [
        {"ph": "X", "pid": 0, "tid": 1, "name": "0F17", "cat": "dec", "ts": 0, "dur": 300},
        {"ph": "X", "pid": 0, "tid": 3, "name": "2F17", "cat": "dec", "ts": 400, "dur": 500},
        {"ph": "X", "pid": 0, "tid": 0, "name": "2>3@17", "cat": "T", "ts": 900, "dur": 1},  # viewers do not show a duration of 0
    ]
    titles = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert titles == {1: "rank 0: draft", 3: "rank 2: stage 2", 0: "scheduler"}
    assert chrome_trace([], {})["traceEvents"] == []
