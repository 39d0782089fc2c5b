"""Devices: what a driver reports is compared with a plan, and what the kernels of a format cost."""

from __future__ import annotations

import pytest

from pipedec.hardware import DEVICES, WeightFormat, reported_device


def test_a_gpu_is_compared_with_the_plan() -> None:
    for planned, name, gigabytes, difference in (
        ("rtx3090", "NVIDIA GeForce RTX 3090", 25.3, None),
        ("l40", "NVIDIA L40", 47.7, None),
        ("l40s", "NVIDIA L40S", 47.7, None),
        ("l40", "NVIDIA L40S", 47.7, "a NVIDIA L40S, but the plan has a l40 there"),
        ("rtx3090", "NVIDIA GeForce RTX 4090", 25.3, "a NVIDIA GeForce RTX 4090, but the plan has a rtx3090 there"),
        ("h100", "NVIDIA H100 MIG 1g.10gb", 10.5, "a NVIDIA H100 MIG 1g.10gb with 10.5 GB, but the plan counts on 80 GB"),
    ):
        assert DEVICES[planned].difference(name, round(gigabytes * 1e9)) == difference


def test_a_kernel_for_four_bits_reads_the_weights_again_for_every_sixteen_rows() -> None:
    gpu, cpu = DEVICES["rtx3090"], DEVICES["cpu"]
    time = gpu.pass_time(10**9, 0, 0, WeightFormat("bfloat16", "int4"))
    assert time.ms(1) == time.ms(16) == pytest.approx(625 / 936)
    assert time.ms(17) == time.ms(32) == pytest.approx(2 * time.ms(1)) and time.ms(64) == pytest.approx(4 * time.ms(1))
    assert time.knee_rows == 16
    assert gpu.pass_time(10**9, 0, 0, WeightFormat("float16", "int4")).reread_ms == 0, "widened before the product"
    assert cpu.pass_time(10**9, 0, 0, WeightFormat("bfloat16", "int4")).reread_ms == 0, "widened in its cache"


def test_a_gpu_is_known_by_the_name_that_its_driver_reports() -> None:
    for reported, name in {
        "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA L40S": "l40s", "NVIDIA L40": "l40",
        "NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA A100-SXM4-40GB": None,
        "Tesla T4": None, "": None,
    }.items():  # fmt: skip
        device = reported_device(reported)
        assert (device and device.name) == name
