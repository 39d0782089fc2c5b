"""``pipedec top``: a running cluster as a table or as frames, and none."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import Calls as Pipedec
from support.programs import Started, Terminal

from pipedec.cli.top import top
from pipedec.cluster.local import LocalCluster

pytestmark = pytest.mark.usefixtures("leaves_nothing")

GUIDE = Path(__file__).parents[2] / "docs" / "live.md"
LONG = ("--prompt", "Tell a long story.", "--max-tokens", "1500", "--ignore-eos")


def test_one_table_of_a_running_cluster(pipedec: Pipedec, started: Started, known_resident: LocalCluster) -> None:
    asking = started("submit", *LONG)
    assert asking.stdout is not None and asking.stdout.read(1), "the answer has begun"
    ended = pipedec("top", "--once")
    assert ended.status == 0 and ended.err == ""
    assert f"run {known_resident.run_id}: up, epoch 0, 3 of 3 ranks alive" in ended.out
    assert re.search(r"^2 stages in 2 groups, passage \d+ timesteps$", ended.out, re.MULTILINE)
    assert (figures := re.search(r"^1 running, 0 waiting; KV \d+%; ([\d.]+) tokens/s", ended.out, re.MULTILINE))
    assert float(figures[1]) > 0
    assert re.search(r"^request +method +tokens +answer", ended.out, re.MULTILINE)
    assert re.search(r"^\d+ +pipedec-bestfirst +\d+ +\S", ended.out, re.MULTILINE), ended.out
    assert "rank 0 " in ended.out and "\x1b" not in ended.out


def test_frames_are_lines_of_json(pipedec: Pipedec, known_resident: LocalCluster) -> None:
    ended = pipedec("top", "--once", "--json")
    frames = [json.loads(line) for line in ended.out.splitlines()]
    assert ended.status == 0 and {frame["run"] for frame in frames} == {known_resident.run_id}
    assert [frame["k"] for frame in frames].count("stats") == 2
    about = next(frame for frame in frames if frame["k"] == "run")
    assert (about["v"], about["stages"], about["groups"]) == (1, 2, 2)


def test_mistakes_are_refused_in_one_line(pipedec: Pipedec, state_directory: Path) -> None:
    assert "no cluster is running here" in pipedec("top", "--once").refused()
    assert "no terminal: give --once for one table, or --json for all frames" in pipedec("top").refused()


@pytest.mark.fast_cases
@pytest.mark.parametrize("by_signal", [False, True])
def test_it_leaves_the_terminal_as_it_was(
    terminal: Callable[..., Terminal], known_resident: LocalCluster, by_signal: bool
) -> None:
    screen = terminal("top", TERM="xterm-256color", COLUMNS="100", LINES="30")
    screen.until("3 of 3 ranks alive", "0 running", "request", "3 of 3 ranks alive")
    if by_signal:
        screen.process.send_signal(signal.SIGTERM)
    else:
        screen.type("\x03")
    assert screen.ended() == 0
    assert "\x1b[?25h" in screen.shown, "the cursor is there again"


def test_the_guide_names_flags_that_exist() -> None:
    guide = GUIDE.read_text()
    known = {flag for parameter in top.params for flag in parameter.opts}
    assert {flag for line in guide.splitlines() if "pipedec top" in line for flag in re.findall(r"--[a-z]+", line)} <= known
