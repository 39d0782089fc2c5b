"""How tests are chosen for the fast tier and for a change, and how the costs of a run are counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.durations import Durations, Record, calibration_seconds
from support.selection import Reach, quarter_of

TESTS = Path(__file__).parent

CASES = """
import pytest

@pytest.mark.fast_cases
@pytest.mark.parametrize("number", [1, 2])
def test_first(number): pass

@pytest.mark.fast_cases("2", "3")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_named(number): pass

@pytest.fixture(params=["windows", "tasks"])
def resident(request): pass

def test_cluster(resident): pass

@pytest.mark.fast_cases("windows", "tasks")
def test_both(resident): pass

@pytest.mark.parametrize("word", ["tasks of a day"])
def test_word(word): pass
"""

MARKED = """
import pytest

@pytest.mark.numbers
def test_computes(): pass

@pytest.mark.numbers
@pytest.mark.hypothesis
def test_property(): pass

def test_reads(): pass
"""

IN_TURN = """
import pytest

@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("number", range(7))
def test_slow(number): pass

@pytest.mark.in_turn(3)
@pytest.mark.fast_cases("0")
@pytest.mark.parametrize("number", range(3))
def test_fast(number): pass

@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_alone(): pass
"""

BURNS = "import time\nwhile time.process_time() < 0.6: pass"
DETACHED = f"""
import subprocess, sys

def test_leaves_a_process_behind():
    parent = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, " \\
             "stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", parent, {BURNS!r}], capture_output=True, check=True).stdout)
    while open(f"/proc/{{pid}}/stat").read().split()[2] != "Z": pass
"""


def run_pytest(tmp_path: Path, source: str, *arguments: str, statuses: Sequence[int] = (0,)) -> str:
    """The output of pytest for one test file, with this repository's markers and plugins."""
    (tmp_path / "test_it.py").write_text(source)
    plugins = ("no:cacheprovider", "support.durations", "support.tiers", "support.selection")
    options = [*(part for plugin in plugins for part in ("-p", plugin)), "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *options, *arguments, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in statuses, done.stdout + done.stderr
    return done.stdout


def test_the_fast_tier_has_the_first_case_or_those_that_are_named(tmp_path: Path) -> None:
    listed = run_pytest(tmp_path, CASES, "--collect-only", "-q", "-m", "not slow")
    assert re.findall(r"::test_(.+)", listed) == [
        "first[1]", "named[2]", "named[3]", "cluster[windows]", "both[windows]", "both[tasks]", "word[tasks of a day]",
    ]  # fmt: skip


def test_slow_cases_come_in_turn_and_fast_ones_always(tmp_path: Path) -> None:
    turns = [
        re.findall(r"::test_(.+)", run_pytest(tmp_path, IN_TURN, "--collect-only", "-q", f"--turn={turn}")) for turn in range(3)
    ]
    shared = sorted(name for turn in turns for name in turn if name not in ("fast[0]", "alone"))
    assert shared == ["fast[1]", "fast[2]", *(f"slow[{number}]" for number in range(7))]
    assert all("fast[0]" in turn and 2 <= sum("slow" in name for name in turn) <= 3 for turn in turns)
    assert ["alone" in turn for turn in turns] in ([True, False, True], [False, True, False])


def test_what_another_run_does_with_a_quarter_is_left_out(tmp_path: Path) -> None:
    own = quarter_of("test_it.py")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    chosen = {
        ("--quarter", own): ["computes", "property", "reads"],
        ("--changed-since", "HEAD", "--quarter", own): ["property", "reads"],
        ("--changed-since", "unknown", "--quarter", (own + 1) % 4): ["computes", "property", "reads"],
    }
    for options, names in chosen.items():
        listed = run_pytest(tmp_path, MARKED, "--collect-only", "-q", *map(str, options), statuses=(0, 5))
        assert re.findall(r"::test_(.+)", listed) == names, options


@pytest.mark.parametrize(
    ("changed", "reached", "others"),
    [
        ("pipedec/sampling/noise.py", "sampling/test_noise.py engine/test_local_pipeline.py", "text/test_stream.py"),
        ("pipedec/live/page.html", "live/test_live_page.py", "sampling/test_noise.py"),
        ("pipedec/live/chat.html", "live/test_chat_page.py", "sampling/test_noise.py"),
        ("tests/support/tiny_pair.py", "support/shared_models.py", "sampling/test_noise.py"),
        ("tests/server/conftest.py", "server/test_listening.py", "sampling/test_noise.py"),
        ("docs/reliability-cases.md", "hostile/test_reliability_guide.py", "sampling/test_noise.py"),
        ("launch/ray.py", "launch/test_ray.py", "sampling/test_noise.py"),
    ],
)
def test_a_change_is_reached_by_imports_helpers_and_names(changed: str, reached: str, others: str) -> None:
    reaches = Reach(TESTS.parent, {changed})
    assert all(reaches.is_reached([TESTS / path]) for path in reached.split())
    assert not any(reaches.is_reached([TESTS / path]) for path in others.split())


def test_what_ranks_and_the_program_run_is_reached_by_tests_that_start_processes() -> None:
    file = [TESTS / "text" / "test_stream.py"]
    for changed, is_reached in (("lua/grant.lua", True), ("pipedec/messages/events.py", True), ("docs/drafts.md", False)):
        reaches = Reach(TESTS.parent, {changed})
        assert reaches.is_reached(file, is_process=True) == is_reached, changed
        assert not reaches.is_reached(file)


@pytest.mark.usefixtures("leaves_nothing")
def test_processes_that_lost_their_parent_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "seconds.json"
    shown = run_pytest(tmp_path, DETACHED, f"--cpu-seconds={out}")
    seconds = json.loads(out.read_text())
    assert seconds["tests"]["test_it.py::test_leaves_a_process_behind"] >= 0.6
    assert seconds["total"] > sum(seconds["tests"].values())
    assert re.search(r"\d+\.\d  test_it\.py\n", shown) and "calibration loop takes" in shown


def test_costs_are_written_and_what_has_grown_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.durations.RECORD", tmp_path / "durations.json")
    assert Record.read("fast").files == {}
    Record(0.125, {"tests/test_a.py": (1.5, 2.0)}).write("fast")
    Record(0.25, {"tests/test_b.py": (0.5, 0.75)}).write("rest")
    assert Record.read("fast") == Record(0.125, {"tests/test_a.py": [1.5, 2.0]})
    grown = Durations("fast", is_written=False, out=None).grown(
        {"tests/test_a.py": (4.0, 1.0), "tests/test_b.py": (0.5, 1.0)}, 0.25
    )
    assert grown == {"tests/test_a.py": 1.0, "tests/test_b.py": 0.5}  # at half the speed 1.5 s are 3 s


def test_files_that_take_longest_come_first_and_others_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.durations.RECORD", tmp_path / "durations.json")
    Record(0.1, {"a.py": (9.0, 1.0), "b.py": (1.0, 2.0)}).write("fast")
    items = [SimpleNamespace(path=name, nodeid=f"{name}::test") for name in ("a.py", "b.py", "new.py")]
    Durations(None, is_written=False, out=None).pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [item.path for item in items] == ["new.py", "b.py", "a.py"]


def test_the_calibration_loop_takes_cpu_time() -> None:
    assert calibration_seconds() > 0
