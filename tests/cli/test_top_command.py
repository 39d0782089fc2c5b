"""``pipedec top``: runs that are there or not, recordings, and the terminal as it was before."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.called import Calls as Pipedec
from support.programs import take_terminal
from support.tiny_pair import Pair

from pipedec.cli.top import top
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.state import RunningCluster
from pipedec.core import SamplingParams
from pipedec.messages import PromptRequest

pytestmark = pytest.mark.usefixtures("leaves_nothing")

WAIT_SECONDS = 60.0
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
    assert [(run["run"], run["state"], run["stages"], run["stats"]) for run in told] == [
        ("one", "recording", 2, None),
        ("two", "recording", 2, None),
    ]
    assert told[1]["requests"] == [{"number": 7, "method": "pp", "tokens": 1, "text": "Therefore.", "end": "stop"}]


def test_all_frames_in_json_are_the_recording(pipedec: Pipedec, recording: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_text(pipedec("top", "--recording", recording, "--json").out)
    frames = [json.loads(line) for line in copy.read_text().splitlines()]
    assert [frame for frame in frames if frame["run"] == "two"] == recorded("two", "Therefore.", us=500_000)
    assert pipedec("top", "--recording", copy, "--once").out == pipedec("top", "--recording", recording, "--once").out


@pytest.mark.parametrize("content", [b"", b"not json", b'{"k": "run"}', b"[1]", b"\x1f\x8bdamaged", b"\xff\xfe"])
def test_what_is_no_recording_is_refused(pipedec: Pipedec, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert "--recording" in pipedec("top", "--recording", tmp_path / "file", "--once").refused()


def test_other_mistakes_are_refused_in_one_line(pipedec: Pipedec, recording: Path, tmp_path: Path) -> None:
    assert "no cluster is running here" in pipedec("top", "--once").refused()
    assert "No such file" in pipedec("top", "--recording", tmp_path / "none", "--once").refused()
    assert "leave out --redis" in pipedec("top", "--recording", recording, "--running", "--once").refused()
    assert "no terminal" in pipedec("top", "--recording", recording).refused()
    recording.write_text(json.dumps(recorded("one", "x")[0] | {"v": 2}))
    assert "frames of version 2" in pipedec("top", "--recording", recording, "--once").refused()


class Screen:
    """``pipedec top`` on a pseudo-terminal, and all that it has written."""

    def __init__(self, *arguments: str | Path) -> None:
        self._master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            [Path(sys.executable).parent / "pipedec", "top", *map(str, arguments)],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment,
            preexec_fn=lambda: take_terminal(os.dup(self.slave)),
        )  # fmt: skip
        self.written = ""

    def until(self, *texts: str) -> None:
        """Read until all of the texts have been written since the last call."""
        ends = time.monotonic() + WAIT_SECONDS
        while not all(text in self.written for text in texts):
            assert time.monotonic() < ends and select.select([self._master], [], [], WAIT_SECONDS)[0], (texts, self.written)
            self.written += os.read(self._master, 4096).decode(errors="replace")
        self.written = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ended(self) -> int:
        """The exit status; the terminal is as it was."""
        ends = time.monotonic() + WAIT_SECONDS
        while (status := self.process.poll()) is None:
            assert time.monotonic() < ends, self.written
            if select.select([self._master], [], [], 0.1)[0]:
                self.written += os.read(self._master, 4096).decode(errors="replace")
        while select.select([self._master], [], [], 0)[0]:
            self.written += os.read(self._master, 4096).decode(errors="replace")
        assert "\x1b[?1049l" in self.written and "\x1b[?25h" in self.written and "Traceback" not in self.written
        assert termios.tcgetattr(self.slave) == self.before
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_SECONDS)
        os.close(self._master)
        os.close(self.slave)


@pytest.fixture
def on_terminal(recording: Path) -> Iterator[Screen]:
    screen = Screen("--recording", recording)
    yield screen
    screen.close()


def test_keys_choose_a_run_and_stop_the_picture(on_terminal: Screen) -> None:
    on_terminal.until("\x1b[?1049h", "Because.", "Therefore.", "rows in flight")
    on_terminal.type(" ")
    on_terminal.until("STOPPED")
    on_terminal.type("\x1b[C\x1bOA")
    on_terminal.until("STOPPED")
    on_terminal.type(" q")
    assert on_terminal.ended() == 0


@pytest.mark.fast_cases
@pytest.mark.parametrize("by_signal", [False, True])
def test_the_terminal_is_as_it_was_after_ctrl_c_and_sigterm(on_terminal: Screen, by_signal: bool) -> None:
    on_terminal.until("\x1b[?1049h", "Because.", "Therefore.")
    if by_signal:
        on_terminal.process.send_signal(signal.SIGTERM)
    else:
        on_terminal.type("\x03")
    assert on_terminal.ended() == 0


def test_a_running_cluster_is_told_once(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    ended = pipedec("top", "--once", "--json")
    assert ended.status == 0, ended.err
    told = json.loads(ended.out)
    assert told["run"] == known_resident.run_id and told["state"] == "up" and told["ranks"] == {"alive": 3, "all": 3}
    assert told["stats"]["running"] == 0 and (told["stages"], told["groups"]) == (2, 2)


def test_a_run_is_drawn_while_it_answers_and_stays_listed_when_it_has_ended(pair: Pair, state_directory: Path) -> None:
    with LocalCluster(pair.spec(2)) as cluster:
        RunningCluster(cluster.address.redis_url, cluster.run_id, os.getpid()).save()
        assert cluster.scheduler is not None
        screen = Screen("--running")
        try:
            screen.until("0 running", "no request has come yet")
            client = Client(cluster.scheduler, cluster.check)
            request = PromptRequest("How many clips?", sampling=SamplingParams(max_tokens=64, ignore_eos=True))
            said = client.ask(request).text
            screen.until("length", "stage 2", "verdict", *re.findall(r"[a-z]{4,}", said)[-1:])
            cluster.stop()
            screen.until("ended")
            screen.type("q")
            assert screen.ended() == 0
        finally:
            screen.close()


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
