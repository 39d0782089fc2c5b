"""Three tables of published numbers: devices a stage may run on, links between them, shapes of well-known models.

Owns the numbers and the quantities derived from them (parameters, bytes, peak rates, times). Does not know clusters,
configuration files or how layers are divided into stages.
"""

from __future__ import annotations

from dataclasses import dataclass

GIGA = 1_000_000_000
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Launch overhead of one layer whose kernels are replayed as a CUDA graph: about ten kernels, each followed by a gap of one to
# two microseconds. An assumption, not a data sheet figure.
LAUNCH_US_PER_LAYER = 15.0


@dataclass(frozen=True)
class PassTime:
    """Duration of one forward pass through some layers on a device: a roofline plus kernel launches.

    Attributes:
        read_ms: time to read the weights from memory once.
        row_ms: time to multiply one row by them at the peak rate.
        launch_ms: launch overhead of the kernels.
    """

    read_ms: float
    row_ms: float
    launch_ms: float

    def ms(self, rows: int) -> float:
        """Milliseconds for ``rows`` rows: memory-bound up to ``knee_rows``, then compute-bound."""
        return max(self.read_ms, rows * self.row_ms) + self.launch_ms

    @property
    def knee_rows(self) -> float:
        """The knee of the roofline: number of rows from which compute takes longer than reading the weights."""
        return self.read_ms / self.row_ms


@dataclass(frozen=True)
class Link:
    """A connection between two devices: one-way latency in µs, usable bandwidth in GB/s, and the source of both."""

    name: str
    latency_us: float
    gb_per_s: float
    source: str

    def transfer_ms(self, num_bytes: float) -> float:
        return self.latency_us / 1000 + 1000 * num_bytes / (self.gb_per_s * GIGA)


@dataclass(frozen=True)
class Device:
    """A GPU according to its data sheet. Rates are dense, without sparsity.

    Attributes:
        memory_gb: memory in GB, counted as 10^9 bytes. Data sheets mean 2^30 bytes; the difference of 7 % is reserved for the
            driver, the allocator and fragmentation.
        bandwidth_gb_per_s: memory bandwidth in GB/s.
        float32_tflops: peak rate of plain float32, without TF32.
        bfloat16_tflops: peak tensor core rate for 16-bit operands with float32 accumulation.
        source: where the figures come from.
    """

    name: str
    memory_gb: float
    bandwidth_gb_per_s: float
    float32_tflops: float
    bfloat16_tflops: float
    source: str

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gb * GIGA)

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s with weights of ``dtype``."""
        return (self.float32_tflops if dtype == "float32" else self.bfloat16_tflops) * 1e12

    def pass_time(self, parameters: int, layers: int, dtype: str) -> PassTime:
        """One forward pass through ``layers`` layers with ``parameters`` weights of ``dtype`` in total."""
        read_seconds = parameters * DTYPE_BYTES[dtype] / (self.bandwidth_gb_per_s * GIGA)
        row_seconds = 2 * parameters / self.peak_flops(dtype)
        return PassTime(1000 * read_seconds, 1000 * row_seconds, layers * LAUNCH_US_PER_LAYER / 1000)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a LLaMA model, under the names of its Hugging Face ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool = False
    head_dim: int | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one transformer layer: attention, SwiGLU, two norms."""
        query_and_output = 2 * self.num_attention_heads * self.head_size
        key_and_value = 2 * self.num_key_value_heads * self.head_size
        return self.hidden_size * (query_and_output + key_and_value + 3 * self.intermediate_size + 2)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding; the head has the same number."""
        return self.vocab_size * self.hidden_size

    @property
    def cache_values_per_token(self) -> int:
        """Elements of one token in the KV cache of one layer: a key and a value per key-value head."""
        return 2 * self.num_key_value_heads * self.head_size

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        embeddings = self.embedding_parameters * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * self.layer_parameters + self.hidden_size


DEVICES = {
    device.name: device
    for device in (
        Device("rtx3090", 24, 936, 35.6, 71, "NVIDIA GA102 GPU architecture whitepaper"),
        Device("rtx4090", 24, 1008, 82.6, 165.2, "NVIDIA Ada GPU architecture whitepaper"),
        Device("l40", 48, 864, 90.5, 181.05, "NVIDIA L40 data sheet"),
        Device("a100-80", 80, 2039, 19.5, 312, "NVIDIA A100 data sheet (SXM)"),
        Device("h100", 80, 3350, 67, 989, "NVIDIA H100 data sheet (SXM)"),
        Device("h200", 141, 4800, 67, 989, "NVIDIA H200 data sheet (SXM)"),
    )
}

LINKS = {
    link.name: link
    for link in (
        Link("10gbe", 50, 1.25, "line rate of 10 Gbit/s; latency of a small message over TCP"),
        Link("25gbe", 40, 3.125, "line rate of 25 Gbit/s; latency of a small message over TCP"),
        Link("pcie4", 20, 12, "PCIe 4.0 x16, as reached by peer-to-peer copies or by two copies through pinned memory"),
        Link("nvlink", 10, 250, "NVLink 3 of an A100: 300 GB/s in one direction, less protocol"),
    )
}

MODEL_SHAPES = {
    "llama-3.1-405b": ModelShape(16384, 53248, 126, 128, 8, 128256),
    "llama-3.1-70b": ModelShape(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-8b": ModelShape(4096, 14336, 32, 32, 8, 128256),
    "llama-3.2-1b": ModelShape(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
}
