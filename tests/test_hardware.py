"""Devices: what a driver reports is compared with a plan."""

from __future__ import annotations

import pytest

from pipedec.hardware import DEVICES


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
