"""``pipedec top``: runs that are there or not, recordings, and the terminal as it was before."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.programs import Calls as Pipedec
from support.programs import Terminal

from pipedec.cli.top import top
from pipedec.cluster.local import LocalCluster

pytestmark = pytest.mark.usefixtures("leaves_nothing")

DOCS = Path(__file__).parents[2] / "docs"


def recorded(name: str, text: str, us: int = 0) -> list[dict[str, Any]]:
    about = {"v": 1, "epoch": 0, "stages": 2, "groups": 2, "target": "/models/pair/target", "draft": None, "us": 0}
    verdict = {"r": 7, "tokens": [[1, text, None]], "text": text, "hit": False, "late": 0, "pruned": [], "end": None}
    frames = [
        {"k": "run"} | about,
        {"k": "open", "t": 0, "us": us, "r": 7, "method": "pp", "prompt": "Why?", "prompt_tokens": 2, "cached": 0, "said": ""},
        {"k": "step", "t": 1, "us": us + 1, "ms": 1.0, "in": [{"r": 7, "rows": [[0, -1, 1, "x", 1.0]]}], "out": []},
        {"k": "step", "t": 2, "us": us + 2, "ms": 1.0, "in": [], "out": [verdict]},
        {"k": "close", "r": 7, "reason": "stop", "metrics": None},
    ]
    return [frame | {"run": name} for frame in frames]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "two.jsonl.gz"
    frames = recorded("one", "Because.") + recorded("two", "Therefore.", us=500_000)
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, frames)).encode()))
    return path


def test_a_recording_is_drawn_once(pipedec: Pipedec, recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = pipedec("top", "--recording", recording, "--once")
    assert ended.status == 0 and ended.err == "" and max(map(len, ended.out.splitlines())) == 80
    for wanted in ("one · recording · 2 stages", "Because.", "two · recording · 2 stages", "Therefore.", "▸ 7  pp  1 tokens"):
        assert wanted in ended.out


def test_a_recording_is_told_as_a_document_of_each_run(pipedec: Pipedec, recording: Path) -> None:
    told = [json.loads(line) for line in pipedec("top", "--recording", recording, "--once", "--json").out.splitlines()]
    shown = [(run["run"], run["state"], run["stages"], run["stats"]) for run in told]
    assert shown == [(name, "recording", 2, None) for name in ("one", "two")]
    assert told[1]["requests"] == [{"number": 7, "method": "pp", "tokens": 1, "text": "Therefore.", "end": "stop"}]


def test_all_frames_in_json_are_the_recording(pipedec: Pipedec, recording: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_text(pipedec("top", "--recording", recording, "--json").out)
    frames = [json.loads(line) for line in copy.read_text().splitlines()]
    assert [frame for frame in frames if frame["run"] == "two"] == recorded("two", "Therefore.", us=500_000)
    assert pipedec("top", "--recording", copy, "--once").out == pipedec("top", "--recording", recording, "--once").out


def test_mistakes_are_refused_in_one_line(pipedec: Pipedec, recording: Path, tmp_path: Path) -> None:
    for content in (b"", b"not json", b'{"k": "run"}', b"[1]", b"\x1f\x8bdamaged", b"\xff\xfe"):
        (tmp_path / "file").write_bytes(content)
        assert "--recording" in pipedec("top", "--recording", tmp_path / "file", "--once").refused()
    assert "no cluster is running here" in pipedec("top", "--once").refused()
    assert "No such file" in pipedec("top", "--recording", tmp_path / "none", "--once").refused()
    assert "leave out --redis" in pipedec("top", "--recording", recording, "--running", "--once").refused()
    assert "no terminal" in pipedec("top", "--recording", recording).refused()
    recording.write_text(json.dumps(recorded("one", "x")[0] | {"v": 2}))
    assert "frames of version 2" in pipedec("top", "--recording", recording, "--once").refused()


@pytest.fixture
def on_terminal(terminal: Callable[..., Terminal], recording: Path) -> Terminal:
    screen = terminal("top", "--recording", recording, TERM="xterm-256color", COLUMNS="100", LINES="30")
    screen.until("\x1b[?1049h", "Because.", "Therefore.", "rows in flight")
    return screen


@pytest.mark.fast_cases
@pytest.mark.parametrize("by_signal", [False, True])
def test_keys_stop_the_picture_and_it_leaves_the_terminal_as_it_was(on_terminal: Terminal, by_signal: bool) -> None:
    for keys in (" ", "\x1b[C\x1bOA"):
        on_terminal.type(keys)
        on_terminal.until("STOPPED")
    if by_signal:
        on_terminal.process.send_signal(signal.SIGTERM)
    else:
        on_terminal.type("\x03")
    assert on_terminal.ended() == 0
    assert "\x1b[?1049l" in on_terminal.shown and "\x1b[?25h" in on_terminal.shown


def test_a_running_cluster_is_told_once(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    ended = pipedec("top", "--once", "--json")
    assert ended.status == 0, ended.err
    told = json.loads(ended.out)
    assert told["run"] == known_resident.run_id and told["state"] == "up" and told["ranks"] == {"alive": 3, "all": 3}
    assert told["stats"]["running"] == 0 and (told["stages"], told["groups"]) == (2, 2)


def test_the_guide_names_flags_that_exist() -> None:
    guide = (DOCS / "live.md").read_text()
    known = {flag for parameter in top.params for flag in parameter.opts}
    assert {flag for line in guide.splitlines() if "pipedec top" in line for flag in re.findall(r"--[a-z]+", line)} <= known
    assert {flag for flag in known if flag not in guide} == set()


def test_the_recording_of_the_guide_shows_four_methods(pipedec: Pipedec) -> None:
    told = pipedec("top", "--recording", DOCS / "live" / "paper-14.jsonl.gz", "--once", "--json").out.splitlines()
    runs = [json.loads(line) for line in told]
    assert [run["requests"][0]["method"] for run in runs] == ["pp", "stpp", "pipedec", "pipedec-bestfirst"]
    assert len({run["requests"][0]["text"] for run in runs}) == 1, "the same answer by every method"
    assert {run["stages"] for run in runs} == {14}
