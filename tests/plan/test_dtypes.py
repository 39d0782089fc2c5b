"""Which dtype ``auto`` stands for, by what devices compute."""

from __future__ import annotations

import pytest
from support.clusters import clustered

from pipedec.config import ClusterConfig, DeviceConfig, ServerConfig
from pipedec.formats import WeightFormat
from pipedec.plan.dtypes import Arithmetic, draft_dtype, target_dtype
from pipedec.plan.partition import plan

OLD_CPU, NEW_CPU = Arithmetic(False, False), Arithmetic(False, True)
OLD_GPU, NEW_GPU = Arithmetic(True, False), Arithmetic(True, True)


@pytest.mark.parametrize(
    ("checkpoint", "stages", "dtype", "why"),
    [
        ("bfloat16", [NEW_GPU, NEW_GPU], "bfloat16", "the checkpoint's own"),
        ("float16", [OLD_GPU], "float16", "the checkpoint's own"),
        ("bfloat16", [NEW_GPU, OLD_GPU], "float16", "a GPU has no bfloat16 instructions"),
        ("float32", [NEW_GPU], "float32", "the checkpoint has no 16 bits"),
        ("bfloat16", [NEW_CPU], "float32", "the target runs on a CPU"),
        ("bfloat16", [NEW_GPU, NEW_CPU], "float32", "the target runs on a CPU"),
    ],
)
def test_a_target_has_16_bits_on_gpus_alone(checkpoint: str, stages: list[Arithmetic], dtype: str, why: str) -> None:
    chosen = target_dtype("auto", checkpoint, stages)
    assert (chosen.name, chosen.why.partition(":")[0]) == (dtype, why)


@pytest.mark.parametrize(
    ("target", "device", "dtype", "why"),
    [
        ("float32", NEW_CPU, "bfloat16", "this processor has bfloat16 instructions"),
        ("float32", OLD_CPU, "float32", "this processor has no bfloat16 instructions"),
        ("float32", NEW_GPU, "bfloat16", "a GPU computes 16 bits faster"),
        ("float16", NEW_GPU, "float16", "as the target"),
        ("float64", OLD_GPU, "float16", "the GPU has no bfloat16 instructions"),
    ],
)
def test_a_draft_has_16_bits_where_its_device_has_instructions(target: str, device: Arithmetic, dtype: str, why: str) -> None:
    chosen = draft_dtype("auto", target, device)
    assert (chosen.name, chosen.why) == (dtype, why)


@pytest.mark.parametrize(("given", "device"), [("float16", OLD_CPU), ("bfloat16", OLD_GPU), ("float32", NEW_GPU)])
def test_what_is_given_is_taken(given: str, device: Arithmetic) -> None:
    assert target_dtype(given, "bfloat16", [device]).name == draft_dtype(given, "bfloat16", device).name == given


def cluster(stage: str, draft: str, **settings: object) -> ClusterConfig:
    partition = {"stages": 4, "devices": [DeviceConfig("here", stage, 4)], "draft_device": DeviceConfig("here", draft)}
    servers = [ServerConfig("here", {"h100": 5, "cpu": 5})]
    return clustered(servers, {"one": partition}, target="llama-3.1-8b", draft="llama-3.2-1b", **settings)


def test_a_plan_goes_by_the_devices_that_it_names() -> None:
    assert plan(cluster("h100", "h100")).weights == WeightFormat("bfloat16")
    assert plan(cluster("cpu", "h100")).weights == WeightFormat("float32")
    assert plan(cluster("cpu", "cpu", dtype="float16", quantize="int8")).weights == WeightFormat("float16", "int8")
    for device, dtype in (("cpu", "float32"), ("h100", "bfloat16")):
        auto, given = (plan(cluster("h100", device, draft_dtype=one)).draft for one in ("auto", dtype))
        assert auto == given, "a plan counts on no instructions of a processor"
    config = cluster("h100", "h100", dtype="float32")
    assert plan(config.for_partition(given={"dtype": "auto"})).weights == WeightFormat("bfloat16")
