"""Two tables of published numbers: devices a stage may run on, and links between them.

Owns the numbers and the quantities derived from them (bytes, peak rates, times). Does not know models, clusters,
configuration files or how layers are divided into stages.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass
from typing import Annotated

from msgspec import Meta

GIGA = 1_000_000_000
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BITS = {"int8": 8, "int4": 4}
QUANTIZED_GROUP = 32  # inputs of an output that share a scale and the weight of 0 in 4 bits
WIDENED_VALUES = 1 << 26  # that a GPU widens of a quantized matrix at once: with fewer, products are too narrow to fill it
# Launch overhead of one layer whose kernels are replayed as a CUDA graph: about ten kernels, each followed by a gap of one to
# two microseconds. An assumption, not a data sheet figure: the program replays graphs, but of 21 to 27 kernels per layer, and has
# not been timed on a GPU.
LAUNCH_US_PER_LAYER = 15.0
# The largest forward that is captured as a graph, whose buffers a plan counts.
CAPTURED_ROWS = 256  # with more of them computing takes longer than launching kernels
CAPTURED_SLOTS = 1 << 15  # all requests together; each layer copies their keys and values
CAPTURED_CELLS = 1 << 21  # in the rectangles of rows and slots
# Rows that torch's kernel for 4-bit weights in bfloat16 on a GPU multiplies at once (ATen/native/cuda/int4mm.cu,
# tinygemm_m16n8k16_chunk_kernel): each tile of so many rows is a block of its own, which reads and widens all weights again.
INT4_KERNEL_ROWS = 16
_SMALLEST_SHARE = 0.95  # a card has at least so much of the memory on its data sheet: drivers keep some of it


@dataclass(frozen=True)
class PassTime:
    """Duration of one forward pass through some layers on a device: a roofline plus kernel launches.

    Attributes:
        read_ms: time to read the weights from memory once.
        row_ms: time to multiply one row by them at the peak rate.
        launch_ms: launch overhead of the kernels.
        past_ms: time to read one token's keys and values in the KV cache.
        reread_ms: time to read weights again for each further ``INT4_KERNEL_ROWS`` rows; 0 if one reading serves all rows.
    """

    read_ms: float
    row_ms: float
    launch_ms: float
    past_ms: float = 0.0
    reread_ms: float = 0.0

    def ms(self, rows: int, past: int = 0) -> float:
        """Milliseconds for ``rows`` rows that attend to ``past`` tokens in all, each read once for its request.

        Memory-bound up to ``knee_rows`` (or more, with much past), then compute-bound. The products of queries with keys and
        values are not counted: they are small beside the weights' at the lengths planned for.
        """
        again_ms = (rows - 1) // INT4_KERNEL_ROWS * self.reread_ms
        return max(self.read_ms + again_ms + past * self.past_ms, rows * self.row_ms) + self.launch_ms

    def slowed(self, factor: float) -> PassTime:
        """With every part so many times as long."""
        return PassTime(*(factor * part for part in astuple(self)))

    @property
    def knee_rows(self) -> float:
        """The knee of the roofline: number of rows from which compute takes longer than reading the weights once."""
        at_peak = self.read_ms / self.row_ms
        return min(at_peak, INT4_KERNEL_ROWS) if self.reread_ms else at_peak


@dataclass(frozen=True)
class WeightFormat:
    """How a model's weights, activations and caches are stored.

    Attributes:
        dtype: of activations, caches, and weights that are not quantized.
        quantize: ``int8`` or ``int4`` for the matrices of the layers, embedding and head then take 8 bits; None for ``dtype``.
    """

    dtype: str
    quantize: str | None = None

    def __str__(self) -> str:
        return self.dtype if self.quantize is None else f"{self.dtype}, weights in {self.quantize}"

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> float:
        """Bytes per weight of a layer, with its share of scales and zero points, but without scales of 8 bits, one per output."""
        if self.quantize is None:
            return self.element_bytes
        groups = 2 * self.element_bytes / QUANTIZED_GROUP if self.quantize == "int4" else 0
        return QUANTIZED_BITS[self.quantize] / 8 + groups

    @property
    def table_bytes(self) -> float:
        """Bytes per weight of the embedding or the head."""
        return self.element_bytes if self.quantize is None else 1

    def read_bytes(self, layer_weights: int, head_weights: int, device: DeviceSpec) -> float:
        """Memory traffic of one pass. On a GPU weights are widened to ``dtype`` in its memory, written there and read again,
        unless a kernel reads them as they are. A processor widens them in its cache."""
        widened = 2 * self.element_bytes if self.quantize is not None and device.is_gpu else 0
        layers = self.layer_bytes + (0 if self.widens_in_kernel else widened)
        return layer_weights * layers + head_weights * (self.table_bytes + widened)

    @property
    def widens_in_kernel(self) -> bool:
        """Whether torch's kernel for a GPU reads the weights of layers as they are."""
        return self.quantize == "int4" and self.dtype == "bfloat16"


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

    def pass_time(
        self, layer_weights: int, head_weights: int, layers: int, weights: WeightFormat, cache_values: int = 0
    ) -> PassTime:
        """One forward pass through ``layers`` layers, which have ``layer_weights`` together, and ``head_weights`` of a head.

        ``cache_values`` are the elements of one token in the KV cache of one layer.
        """
        byte_ms = 1000 / (self.bandwidth_gb_per_s * GIGA)
        read_ms = weights.read_bytes(layer_weights, head_weights, self) * byte_ms
        row_seconds = 2 * (layer_weights + head_weights) / self.peak_flops(weights.dtype)
        launch_ms = layers * LAUNCH_US_PER_LAYER / 1000
        past_ms = layers * cache_values * weights.element_bytes * byte_ms
        reread_bytes = layer_weights * weights.layer_bytes if weights.widens_in_kernel and self.is_gpu else 0
        return PassTime(read_ms, 1000 * row_seconds, launch_ms, past_ms, reread_bytes * byte_ms)


Size = Annotated[int, Meta(ge=1, le=10_000_000)]

DEVICES = {
    device.name: device
    for device in (
        DeviceSpec("rtx3090", 24, 936, 35.6, 71, "NVIDIA GA102 GPU architecture whitepaper", r"RTX 3090\b", 23.69),
        DeviceSpec("rtx4090", 24, 1008, 82.6, 165.2, "NVIDIA Ada GPU architecture whitepaper", r"RTX 4090\b", 23.65),
        DeviceSpec("l40", 48, 864, 90.5, 181.05, "NVIDIA L40 data sheet", r"\bL40\b", 44.4),
        DeviceSpec("l40s", 48, 864, 91.6, 362, "NVIDIA L40S data sheet", r"\bL40S\b", 44.4),
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
