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


def test_tracer_records_only_while_enabled() -> None:
    tracer = Tracer(3)
    with tracer.task("3F1", "dec"):
        pass
    tracer.enabled = True
    with tracer.task("3F2", "dec"), tracer.task("3>4@2", "transfer"):
        pass
    assert [(event.rank, event.label, event.category) for event in tracer.events] == [(3, "3>4@2", "transfer"), (3, "3F2", "dec")]
    inner, outer = tracer.drain()
    assert outer.start_us <= inner.start_us <= inner.end_us <= outer.end_us
    assert tracer.drain() == []


def test_a_task_that_fails_is_recorded() -> None:
    tracer = Tracer(1, enabled=True)
    with pytest.raises(RuntimeError), tracer.task("1F1", "dec"):
        raise RuntimeError
    assert [event.label for event in tracer.events] == ["1F1"]


def test_times_are_on_the_schedulers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1_000_000, 3_500_000])
    monkeypatch.setattr("pipedec.tracing.time.time_ns", lambda: next(clock))
    tracer = Tracer(1, clock_offset_us=-400, enabled=True)
    with tracer.task("1F1", "dec"):
        pass
    assert [event.as_row() for event in tracer.drain()] == [(1, "1F1", "dec", 600, 3100)]


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
