"""``pipedec doctor`` for this host: table, JSON, exit status."""

from __future__ import annotations

import json
import socket
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from rich.console import Console
from support.programs import Calls as Pipedec

from pipedec.cli.doctor import show
from pipedec.cluster.doctor.findings import note, problem
from pipedec.scheduler import EmbeddedRedis

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_a_host_is_examined(pipedec: Pipedec) -> None:
    shown, told = pipedec("doctor"), pipedec("doctor", "--json")
    assert shown.status == told.status == 0, shown.err
    (host, findings), *others = json.loads(told.out).items()
    assert others == [] and host == socket.gethostname()
    assert {"pipedec", "torch", "GPUs", "Redis", "state directory"} <= {finding["name"] for finding in findings}
    assert all(finding["name"].split()[0] in shown.out for finding in findings)
    num_notes = sum(finding["level"] == "note" for finding in findings)
    assert shown.out.splitlines()[-1] == f"1 host, 0 problems, {num_notes} note{'s' if num_notes != 1 else ''}"


def test_gpus_that_torch_cannot_use_are_a_problem(pipedec: Pipedec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (
        ("nvmlInit", lambda: None), ("nvmlSystemGetDriverVersion", lambda: "570.86.15"), ("nvmlDeviceGetCount", lambda: 2),
        ("nvmlDeviceGetHandleByIndex", lambda index: index), ("nvmlDeviceGetName", lambda handle: "NVIDIA L40"),
        ("nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}"),
        ("nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(total=46068 << 20, free=46000 << 20)),
    ):  # fmt: skip
        monkeypatch.setattr(pynvml, name, answer)
    asked = "PowerManagementLimit PowerManagementDefaultLimit PersistenceMode ComputeMode CurrentClocksThrottleReasons"
    for name in (*asked.split(), "ComputeRunningProcesses"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", not_supported)
    monkeypatch.setattr("torch.version.cuda", None)
    ended = pipedec("doctor", "--json")
    found = {finding["name"]: finding for finding in next(iter(json.loads(ended.out).values()))}
    assert ended.status == 1 and found["GPUs"]["level"] == "problem"
    assert found["GPUs"]["value"] == "2 × NVIDIA L40, 45.0 GiB; torch has no CUDA"
    assert found["NVIDIA driver"]["value"] == "570.86.15, torch for CUDA none"


def not_supported(handle: int) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_redis_is_tried(pipedec: Pipedec, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis() as server:
        monkeypatch.setenv("PIPEDEC_REDIS_URL", server.url)
        assert f"at {server.address}, clock" in pipedec("doctor").out
    ended = pipedec("doctor")
    assert ended.status == 1 and f"cannot reach Redis at {server.address}" in ended.out
    assert "Redis: start Redis at" in ended.out and "there are problems on" in ended.err
    assert server.url.split("@")[0].removeprefix("redis://:") not in ended.out + ended.err


def test_mistakes_are_refused(pipedec: Pipedec, tmp_path: Path) -> None:
    assert "no such file" in pipedec("doctor", "--cluster", tmp_path / "none.yaml").refused()
    assert "give --cluster cluster.yaml, too" in pipedec("doctor", "--partition", "p").refused()
    file = tmp_path / "cluster.yaml"
    file.write_text("target: llama-3.1-8b\nservers: [{host: a, devices: {cpu: 1}}]\npartitions: {p: {stages: 1}}\n")
    assert "partition 'q'" in pipedec("doctor", "--cluster", file, "--partition", "q").refused()


def test_what_is_to_be_done_on_several_hosts_is_said_once() -> None:
    table = {host: {"GPU persistence": note("GPU persistence", "off", "sudo nvidia-smi -pm 1")} for host in ("alpha", "beta")}
    table["beta"]["disk"] = problem("disk", "full", "free some")
    console = Console(file=StringIO(), width=100)
    show(table, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[-3:-1] == ["! alpha, beta: GPU persistence: sudo nvidia-smi -pm 1", "✗ beta: disk: free some"]
    assert lines[-1] == "2 hosts, 1 problem, 2 notes"
