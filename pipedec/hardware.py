"""Two tables of published numbers: devices a stage may run on, and links between them. Knows neither models nor clusters."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIGA = 1_000_000_000
_SMALLEST_SHARE = 0.95  # share of the memory on the data sheet; drivers keep some of it


@dataclass(frozen=True)
class LinkSpec:
    """A connection between two devices: one-way latency in µs, usable bandwidth in GB/s, and the source of both."""

    name: str
    latency_us: float
    gb_per_s: float
    source: str

    def transfer_ms(self, num_bytes: float) -> float:
        return self.latency_us / 1000 + self.occupied_ms(num_bytes)

    def occupied_ms(self, num_bytes: float) -> float:
        """Until the next transfer may begin."""
        return 1000 * num_bytes / (self.gb_per_s * GIGA)


@dataclass(frozen=True)
class DeviceSpec:
    """A GPU according to its data sheet, or a processor. Rates are dense, without sparsity.

    Attributes:
        float32_tflops: peak rate of plain float32, without TF32.
        bfloat16_tflops: peak tensor core rate for 16-bit operands with float32 accumulation.
        source: where the figures come from.
        reported: how its driver names it, as a regular expression; empty for a processor.
        reported_gib: memory that its driver reports, in units of 2^30 bytes; 0 for a processor.
    """

    name: str
    memory_gb: float
    bandwidth_gb_per_s: float
    float32_tflops: float
    bfloat16_tflops: float
    source: str
    reported: str = ""
    reported_gib: float = 0

    @property
    def is_gpu(self) -> bool:
        return bool(self.reported)

    @property
    def memory_bytes(self) -> int:
        """All of it; of a GPU as its driver reports it."""
        return round(self.reported_gib * 2**30) if self.is_gpu else round(self.memory_gb * GIGA)

    def difference(self, name: str, memory_bytes: int) -> str | None:
        """How a GPU, as its driver reports it, differs from this device, as the end of a sentence; None if it does not."""
        if re.search(self.reported, name) is None:
            return f"a {name}, but the plan has a {self.name} there"
        if memory_bytes < _SMALLEST_SHARE * self.memory_bytes:
            return f"a {name} with {memory_bytes / GIGA:.1f} GB, but the plan counts on {self.memory_gb:g} GB"
        return None

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s with weights of ``dtype``."""
        return (self.float32_tflops if dtype == "float32" else self.bfloat16_tflops) * 1e12


DEVICES = {
    device.name: device
    for device in (
        DeviceSpec("rtx3090", 24, 936, 35.6, 71, "NVIDIA GA102 GPU architecture whitepaper", r"RTX 3090\b", 23.69),
        DeviceSpec("rtx4090", 24, 1008, 82.6, 165.2, "NVIDIA Ada GPU architecture whitepaper", r"RTX 4090\b", 23.65),
        DeviceSpec("rtx5090", 32, 1792, 104.8, 209.5, "NVIDIA RTX Blackwell GPU architecture whitepaper", r"RTX 5090$", 31.37),
        DeviceSpec("a6000", 48, 768, 38.7, 154.8, "NVIDIA GA102 GPU architecture whitepaper", r"RTX A6000\b", 47.54),
        DeviceSpec("a10", 24, 600, 31.2, 125, "NVIDIA A10 data sheet", r"\bA10\b", 22.06),
        DeviceSpec("l4", 24, 300, 30.3, 121, "NVIDIA L4 data sheet", r"\bL4\b", 22.03),
        DeviceSpec("l40", 48, 864, 90.5, 181.05, "NVIDIA L40 data sheet", r"\bL40\b", 44.4),
        DeviceSpec("l40s", 48, 864, 91.6, 362, "NVIDIA L40S data sheet", r"\bL40S\b", 44.4),
        DeviceSpec("a100-40", 40, 1555, 19.5, 312, "NVIDIA A100 data sheet (SXM)", r"\bA100\b.*40GB", 39.39),
        DeviceSpec("a100-80", 80, 2039, 19.5, 312, "NVIDIA A100 data sheet (SXM)", r"\bA100\b.*80GB", 79.15),
        DeviceSpec("h100", 80, 3350, 67, 989, "NVIDIA H100 data sheet (SXM)", r"\bH100\b", 79.11),
        DeviceSpec("h200", 141, 4800, 67, 989, "NVIDIA H200 data sheet (SXM)", r"\bH200\b", 139.81),
        DeviceSpec("cpu", 64, 40, 1, 1, "nominal share of a server's processor, not a data sheet figure"),
    )
}


def reported_device(name: str) -> DeviceSpec | None:
    """The GPU that a driver reports under this name; None if it is not in the table."""
    return next((device for device in DEVICES.values() if device.is_gpu and re.search(device.reported, name)), None)


LINKS = {
    link.name: link
    for link in (
        LinkSpec("10gbe", 50, 1.25, "line rate of 10 Gbit/s; latency of a small message over TCP"),
        LinkSpec("25gbe", 40, 3.125, "line rate of 25 Gbit/s; latency of a small message over TCP"),
        LinkSpec("pcie4", 20, 12, "PCIe 4.0 x16, as reached by peer-to-peer copies or by two copies through pinned memory"),
        LinkSpec("nvlink", 10, 250, "NVLink 3 of an A100: 300 GB/s in one direction, less protocol"),
    )
}
