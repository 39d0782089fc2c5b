"""Timelines of traces: their bars and lanes, and the errors about files that are no traces."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipedec.bench.report.timeline import CATEGORIES, draw_timeline, read_timeline
from pipedec.cli.main import program
from pipedec.core.errors import UserError
from pipedec.tracing import SCHEDULER_TRACK, TraceEvent, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A prefill and four timesteps of two stages, in the categories that ranks and scheduler use."""
    events = [TraceEvent(rank, f"{rank}P0", "pre", 0, 900) for rank in range(3)]
    for seq in range(1, 5):
        start = 1000 * seq
        for rank in range(3):
            events.append(TraceEvent(rank, f"{rank}F{seq}", "dec", start, start + 300 + 50 * rank))
            events.append(TraceEvent(rank, f"{rank}S{seq}", "sync", start + 500, start + 520))
            events.append(TraceEvent(SCHEDULER_TRACK, f"{rank}F{seq}", "C", start, start + 350 + 50 * rank))
        events.append(TraceEvent(1, f"0>1@{seq}", "transfer", start + 600, start + 650))
        events.append(TraceEvent(SCHEDULER_TRACK, f"0>1@{seq}", "T", start + 600, start + 700))
    events.append(TraceEvent(SCHEDULER_TRACK, "0E4", "C", 5000, 5001))
    path = tmp_path / "trace.json"
    write_trace(path, events, {SCHEDULER_TRACK: "scheduler", 0: "rank 0: draft", 1: "rank 1: stage 1", 2: "rank 2: stage 2"})
    return path


def test_reads_every_task_into_its_lane(trace: Path) -> None:
    timeline = read_timeline(trace)
    assert list(timeline.lanes.values()) == ["rank 0: draft", "rank 1: stage 1", "rank 2: stage 2", "scheduler"]
    assert {bar.category for bar in timeline.bars} == set(CATEGORIES)
    assert len(timeline.bars) == 3 + 4 * 11, "all but the end of the answer"
    forward = next(bar for bar in timeline.bars if bar.label == "2F3" and bar.lane == 3)
    assert (forward.category, forward.start_ms, forward.end_ms) == ("forward", 3.0, 3.4)


def test_a_part_is_cut_at_its_borders(trace: Path) -> None:
    part = read_timeline(trace).between(2.1, 3.1)
    assert (part.start_ms, part.end_ms) == (2.1, 3.1)
    assert {bar.label for bar in part.bars if bar.category == "forward"} == {
        f"{rank}F{seq}" for rank in range(3) for seq in (2, 3)
    }
    for low, high, words in ((3.0, 2.0, "must be below"), (50.0, 60.0, "no task runs between")):
        with pytest.raises(UserError, match=words):
            read_timeline(trace).between(low, high)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_command_draws(trace: Path, tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / f"timeline{suffix}"
    flags = ["--out", str(out), "--from-ms", "1", "--to-ms", "4.5", "--title", "four timesteps"]
    done = CliRunner().invoke(program, ["bench", "timeline", str(trace), *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    assert out.read_bytes().startswith(magic)


def test_svg_holds_labels_and_legend(trace: Path, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_timeline(read_timeline(trace), tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    assert all(word in text for word in ("rank 1: stage 1", "scheduler", "time (ms)", "2P0", "2F3", *CATEGORIES))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "is not a Chrome trace"),
        ("[1, 2]", "is not a Chrome trace"),
        ('{"traceEvents": [{"ph": "X", "name": "2F1"}]}', "is not a Chrome trace"),
        ('{"traceEvents": [{"ph": "X", "tid": 1, "name": "idle", "cat": "other", "ts": 1, "dur": 1}]}', "holds no pipeline task"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    done = CliRunner().invoke(program, ["bench", "timeline", str(path), "--out", str(tmp_path / "x.png")])
    assert isinstance(done.exception, UserError) and words in str(done.exception) and "\n" not in str(done.exception)


def test_without_matplotlib_the_extra_is_named(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"must end in one of \.svg"):
        draw_timeline(read_timeline(trace), tmp_path / "x.gif")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"pipedec\[bench\]"):
        draw_timeline(read_timeline(trace), tmp_path / "x.png")
