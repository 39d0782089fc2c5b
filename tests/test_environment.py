"""What a process takes from its environment: CPUs of a container, and directories of a user who has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pipedec.config.environment import usable_cpus
from pipedec.engine.devices import limit_threads

CPUS = len(os.sched_getaffinity(0))
V1 = "3:cpuset:/pod\n2:cpu,cpuacct:/pod/box\n1:name=systemd:/\n0::/\n"


@pytest.mark.failure_case("M38")
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
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    assert usable_cpus(tmp_path) == cpus


@pytest.mark.failure_case("M38")
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
