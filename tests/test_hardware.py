"""Devices: what a driver reports is compared with a plan."""

from __future__ import annotations

import pytest

from pipedec.hardware import DEVICES, WeightFormat


@pytest.mark.parametrize(
    ("planned", "name", "gigabytes", "difference"),
    [
        ("rtx3090", "NVIDIA GeForce RTX 3090", 25.3, None),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 25.3, None),
        ("l40", "NVIDIA L40", 47.7, None),
        ("l40s", "NVIDIA L40S", 47.7, None),
        ("h200", "NVIDIA H200", 150.1, None),
        ("l40", "NVIDIA L40S", 47.7, "a NVIDIA L40S, but the plan has a l40 there"),
        ("rtx3090", "NVIDIA GeForce RTX 4090", 25.3, "a NVIDIA GeForce RTX 4090, but the plan has a rtx3090 there"),
        ("h100", "NVIDIA H100 MIG 1g.10gb", 10.5, "a NVIDIA H100 MIG 1g.10gb with 10.5 GB, but the plan counts on 80 GB"),
    ],
)
def test_a_gpu_is_compared_with_the_plan(planned: str, name: str, gigabytes: float, difference: str | None) -> None:
    assert DEVICES[planned].difference(name, round(gigabytes * 1e9)) == difference


@pytest.mark.parametrize(
    ("given", "target", "dtype"),
    [
        (None, "float32", "bfloat16"), (None, "float64", "bfloat16"), (None, "bfloat16", "bfloat16"),
        (None, "float16", "float16"), ("float32", "bfloat16", "float32"),
    ],
)  # fmt: skip
def test_a_draft_has_16_bits_unless_it_is_told_otherwise(given: str | None, target: str, dtype: str) -> None:
    assert WeightFormat.of_draft(given, "int8", target) == WeightFormat(dtype, "int8")
