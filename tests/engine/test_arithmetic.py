"""What this machine's devices compute, and what pipelines therefore compute in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.clusters import clustered
from support.tiny_pair import Pair

from pipedec.config import DeviceConfig, ServerConfig, Settings
from pipedec.core.errors import UserError
from pipedec.core.limits import KNEE_ROWS
from pipedec.engine.build import passes_on, resolve, resolve_partition, weights_on
from pipedec.engine.devices import arithmetic_of
from pipedec.formats import WeightFormat
from pipedec.plan.dtypes import Arithmetic
from pipedec.plan.emulation import Emulation
from pipedec.plan.partition import plan, room_of
from pipedec.plan.spec import run_description

CPU = torch.device("cpu")
Settle = Callable[[bool], None]


@pytest.fixture
def settle(monkeypatch: pytest.MonkeyPatch) -> Settle:
    """Decides whether this processor has bfloat16 instructions."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    return lambda has: monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has)


@pytest.mark.parametrize(
    ("limit", "has_bfloat16"),
    [
        ("", True), ("ALL", True), ("AVX512_CORE_BF16", True), ("avx512_core_amx", True),
        ("AVX512_CORE", False), ("avx2", False), ("AVX2_VNNI_2", False),
    ],
)  # fmt: skip
def test_a_processor_s_instructions_count_as_far_as_onednn_may_use_them(
    limit: str, has_bfloat16: bool, settle: Settle, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(True)
    for name, other in (("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"), ("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA")):
        monkeypatch.setenv(name, limit)
        monkeypatch.setenv(other, "")
        assert arithmetic_of(CPU) == Arithmetic(False, has_bfloat16)
    settle(False)
    assert arithmetic_of(CPU) == Arithmetic(False, False)


def test_gpus_compute_bfloat16_from_capability_8_on(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(8, 0), (9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    assert [arithmetic_of(torch.device("cuda", index)).has_bfloat16 for index in range(3)] == [True, True, False]
    assert arithmetic_of(torch.device("cuda")) == Arithmetic(True, False), "what all of them have"


def with_bfloat16_checkpoint(pair: Pair, folder: Path) -> Path:
    """The pair's target, as if it had been published in bfloat16."""
    folder.mkdir()
    for file in pair.target.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((pair.target / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def test_on_a_processor_the_target_has_32_bits(pair: Pair, tmp_path: Path, settle: Settle) -> None:
    settle(True)
    spec = resolve(Settings.of(target=with_bfloat16_checkpoint(pair, tmp_path / "target"), draft=pair.draft, device="cpu"))
    assert weights_on(spec, 1, CPU) == (
        WeightFormat("float32"),
        "the target runs on a CPU: --dtype bfloat16 takes half the memory",
    )
    assert weights_on(spec, 0, CPU) == (WeightFormat("bfloat16"), "this processor has bfloat16 instructions")
    settle(False)
    assert weights_on(spec, 0, CPU) == (WeightFormat("float32"), "this processor has no bfloat16 instructions")
    numbers = run_description(spec).settings.numbers
    assert (numbers.dtype, numbers.draft_dtype) == ("float32", "auto")


def test_on_gpus_both_have_16_bits(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipedec.engine.build.num_gpus", lambda: 1)
    monkeypatch.setattr("pipedec.engine.build.arithmetic_of", lambda device: Arithmetic(device.type == "cuda", True))
    target = with_bfloat16_checkpoint(pair, tmp_path / "target")
    spec = resolve(Settings.of(target=target, draft=pair.draft))
    numbers = run_description(spec).settings.numbers
    assert numbers.dtype == numbers.draft_dtype == "bfloat16"
    assert resolve(Settings.of(target=pair.target, draft=pair.draft)).dtype == "float32", "published in float32"
    given = resolve(Settings.of(target=target, draft=pair.draft, draft_dtype="float32", stages=2, dtype="float16"))
    assert (given.dtype, given.settings.numbers.draft_dtype, given.dtype_why) == ("float16", "float32", "as given")


PARTITION = {"stages": 2, "devices": [DeviceConfig("here", "h100", 2)], "draft_device": DeviceConfig("here", "cpu")}
SERVERS = [ServerConfig("here", {"h100": 2, "cpu": 3})]


def test_a_cluster_file_decides_by_its_devices_on_every_host(pair: Pair, tmp_path: Path, settle: Settle) -> None:
    """This host has no GPU, and need not: all ranks must come to the same dtype of the target."""
    target = str(with_bfloat16_checkpoint(pair, tmp_path / "target"))
    config = clustered(SERVERS, {"two": PARTITION}, target=target, draft=pair.draft)
    made = resolve_partition(config)
    assert (made.dtype, made.dtype_why, made.settings.numbers.draft_dtype) == ("bfloat16", "the checkpoint's own", "auto")
    assert resolve_partition(config.for_partition(given={"device": "cpu"})).dtype == "float32"
    mixed = replace(config.partitions["two"], devices=(DeviceConfig("here", "h100"), DeviceConfig("here", "cpu")))
    assert resolve_partition(replace(config, partitions={"two": mixed})).dtype == "float32"
    cpus, gpu = (DeviceConfig("here", "cpu", 2),), DeviceConfig("here", "h100")
    on_gpu = replace(config.partitions["two"], devices=cpus, draft_device=gpu)
    made = resolve_partition(replace(config, partitions={"two": on_gpu}))
    assert (made.dtype, made.settings.numbers.draft_dtype) == ("float32", "bfloat16")


def test_a_cluster_file_says_how_many_rows_enter_at_a_timestep(pair: Pair) -> None:
    """Of its plan, on every host the same; an emulation has that of its devices, and a processor's figures are nominal."""
    config = clustered(SERVERS, {"two": PARTITION}, target=str(pair.target), draft=str(pair.draft), dtype="bfloat16")
    made, planned = resolve_partition(config), plan(config)
    assert made.knee == planned.room == 256
    assert replace(made, emulation=Emulation.of_plan(planned)).knee == planned.knee == 347
    assert resolve_partition(config.for_partition(given={"device": "cpu"})).knee == KNEE_ROWS
    on_cpu = replace(config.partitions["two"], devices=(DeviceConfig("here", "cpu", 2),))
    assert resolve_partition(replace(config, partitions={"two": on_cpu})).knee == KNEE_ROWS


def test_without_a_cluster_file_the_gpus_say_how_many_rows_enter_at_a_timestep(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.of(target=pair.target, draft=pair.draft, dtype="bfloat16", stages=2)
    for gpus, knee in (
        (["NVIDIA A100-SXM4-80GB"], 128),
        (["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090"], 64),
        (["an unknown GPU"], KNEE_ROWS),
        ([], KNEE_ROWS),
    ):
        monkeypatch.setattr("pipedec.engine.build.gpu_names", lambda names=gpus: names)
        assert resolve(settings).knee == knee, gpus
    monkeypatch.setattr("pipedec.engine.build.gpu_names", lambda: ["NVIDIA A100-SXM4-80GB"])
    assert resolve(settings.replaced(device="cpu")).knee == KNEE_ROWS
    quantized = resolve(settings.replaced(device="cpu", quantize="int4"))
    assert room_of(passes_on(quantized, ["NVIDIA GeForce RTX 3090"])) == 16


def test_the_kv_budget_counts_as_many_rows_as_enter(pair: Pair) -> None:
    """A request of 448 tokens and 64 rows fits into two blocks of a GPU's size, but not with 256 rows."""
    partition = {"stages": 2, "draft_device": DeviceConfig("here", "cpu")}
    for device, fits in (("rtx3090", True), ("h100", False)):
        config = clustered(
            [ServerConfig("here", {device: 2, "cpu": 1})], {"two": partition}, target=str(pair.target), draft=str(pair.draft),
            dtype="bfloat16", max_model_len=448, kv_cache_memory=512 * 256,
        )  # fmt: skip
        if fits:
            resolve_partition(config)
        else:
            with pytest.raises(UserError, match="one request of 448 tokens needs"):
                resolve_partition(config)
