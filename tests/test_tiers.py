"""How tests are chosen for the fast tier, and how the CPU seconds of a run are counted: runs of pytest on small files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.cpu_seconds import calibration_seconds
from support.thirds import third_of

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

BURNS = "import time\nwhile time.process_time() < 0.6: pass"
DETACHED = f"""
import subprocess, sys

def test_leaves_a_process_behind():
    parent = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, " \\
             "stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", parent, {BURNS!r}], capture_output=True, check=True).stdout)
    while open(f"/proc/{{pid}}/stat").read().split()[2] != "Z": pass
"""


def run_pytest(tmp_path: Path, source: str, *arguments: str) -> str:
    """The output of pytest for one test file, with this repository's markers and plugins."""
    (tmp_path / "test_it.py").write_text(source)
    plugins = ("no:cacheprovider", "support.cpu_seconds", "support.tiers", "support.thirds")
    options = [*(part for plugin in plugins for part in ("-p", plugin)), "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *options, *arguments, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_fast_tier_has_the_first_case_or_those_that_are_named(tmp_path: Path) -> None:
    listed = run_pytest(tmp_path, CASES, "--collect-only", "-q", "-m", "not slow")
    assert re.findall(r"::test_(.+)", listed) == [
        "first[1]", "named[2]", "named[3]", "cluster[windows]", "both[windows]", "both[tasks]", "word[tasks of a day]",
    ]  # fmt: skip


@pytest.mark.fast_cases("--but-third-property reads")
@pytest.mark.parametrize(("option", "chosen"), [("--third", "computes property reads"), ("--but-third", "property reads")])
def test_what_another_run_does_with_a_third_is_left_out(tmp_path: Path, option: str, chosen: str) -> None:
    listed = run_pytest(tmp_path, MARKED, "--collect-only", "-q", option, str(third_of("test_it.py")))
    assert re.findall(r"::test_(.+)", listed) == chosen.split()


@pytest.mark.slow
def test_other_thirds_are_run(tmp_path: Path) -> None:
    listed = run_pytest(tmp_path, MARKED, "--collect-only", "-q", "--but-third", str((third_of("test_it.py") + 1) % 3))
    assert re.findall(r"::test_(.+)", listed) == ["computes", "property", "reads"]


@pytest.mark.usefixtures("leaves_nothing")
def test_processes_that_lost_their_parent_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "seconds.json"
    shown = run_pytest(tmp_path, DETACHED, f"--cpu-seconds={out}")
    seconds = json.loads(out.read_text())
    assert seconds["tests"]["test_it.py::test_leaves_a_process_behind"] >= 0.6
    assert seconds["total"] > sum(seconds["tests"].values())
    assert re.search(r"\d+\.\d  test_it\.py\n", shown) and "calibration loop takes" in shown


def test_the_calibration_loop_takes_cpu_time() -> None:
    assert calibration_seconds() > 0
