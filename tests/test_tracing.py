"""Recording tasks, and the trace file."""

import json
import time
from pathlib import Path

import pytest

from pipedec.tracing import SCHEDULER_TRACK, TraceEvent, Tracer, chrome_trace, write_trace

EVENTS = [
    TraceEvent(2, "2F17", "dec", 5_000_400, 5_000_900),
    TraceEvent(0, "0F17", "dec", 5_000_000, 5_000_300),
    TraceEvent(SCHEDULER_TRACK, "2>3@17", "T", 5_000_900, 5_000_900),
]
NAMES = {0: "rank 0: draft", 2: "rank 2: stage 2", SCHEDULER_TRACK: "scheduler"}


def test_times_are_on_the_schedulers_clock() -> None:
    tracer = Tracer(3, clock_offset_us=1_000_000_000)
    before, began = time.time_ns() // 1000, time.perf_counter()
    tracer.add("3>4@2", "transfer", began, began + 0.0025)
    [event] = tracer.drain()
    assert (event.rank, event.label, event.category) == (3, "3>4@2", "transfer")
    assert event.end_us - event.start_us == pytest.approx(2500, abs=1)
    assert 0 <= event.start_us - before - 1_000_000_000 < 100_000
    assert tracer.drain() == []


def test_rows_travel_as_json() -> None:
    assert [TraceEvent(*json.loads(json.dumps(event.as_row()))) for event in EVENTS] == EVENTS


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


def test_trace_without_events() -> None:
    assert chrome_trace([], {})["traceEvents"] == []
