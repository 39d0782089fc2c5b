"""Costs of a model's parts on a device: bytes of weights, caches and activations, milliseconds of a pass or a transfer."""

from __future__ import annotations

from dataclasses import dataclass

from pipedec.checkpoints.formats import WeightFormat
from pipedec.core.limits import CAPTURED_CELLS, CAPTURED_ROWS, CAPTURED_SLOTS
from pipedec.core.stage_message import Load
from pipedec.families import ModelConfig
from pipedec.formats import WIDENED_VALUES
from pipedec.hardware import DEVICES, DeviceSpec, LinkSpec
from pipedec.plan.roofline import PassTime, pass_time

# Assumptions about a rank on a GPU, which the driver's figures of a running rank may correct.
CONTEXT_BYTES = 350_000_000  # the CUDA context, which exists before anything is loaded
LIBRARY_BYTES = 150_000_000  # code of kernels, loaded when it is first used
CUBLAS_BYTES = 2 * 32 * 2**20  # on the stream that computes and on that of the captures: 32 MiB on Hopper, 8 MiB elsewhere
NCCL_BYTES = 2 * 2 * 8 * 4 * 2**20  # two communicators, each with 8 channels to and fro of NCCL_BUFFSIZE, 4 MiB
PREFILL_ROWS = 512  # rows of prompts that enter at a timestep, at the most


@dataclass(frozen=True)
class RankTiming:
    """Compute and transfer times of one rank, by the data sheets of its device and of its link to the next rank (from the last
    stage, to rank 0).
    """

    compute: PassTime
    link: LinkSpec
    row_bytes: int  # sent for one row: ids, and activations from a stage; 0 from the last stage, which sends a verdict

    def compute_ms(self, load: Load) -> float:
        """Weights and the load's KV entries are read, or rows are multiplied, whichever takes longer."""
        return self.compute.ms(load.rows, load.past)

    def send_ms(self, rows: int) -> float:
        return self.link.transfer_ms(rows * self.row_bytes)

    def occupied_ms(self, rows: int) -> float:
        """How long ``rows`` rows occupy the link to the next rank, without its latency."""
        return self.link.occupied_ms(rows * self.row_bytes)


@dataclass(frozen=True)
class ModelCosts:
    """Bytes and milliseconds of the target's parts."""

    model: ModelConfig
    weights: WeightFormat
    rows: int
    max_model_len: int
    passage: int
    utilization: float = 1.0

    def memory_bytes(self, device: str) -> int:
        """Memory of a device that ranks may take: of a GPU the share that ``gpu_memory_utilization`` gives."""
        spec = DEVICES[device]
        return round(spec.memory_bytes * self.utilization) if spec.is_gpu else spec.memory_bytes

    @property
    def layer_kv_bytes(self) -> int:
        """Past and tree cache of one layer: the context, a tree layer per timestep of a passage, and the layer that enters."""
        return self._slots * self.layer_token_bytes

    @property
    def _slots(self) -> int:
        return self.max_model_len + self.rows * (self.passage + 1)

    @property
    def layer_token_bytes(self) -> int:
        """One token in the KV cache of one layer."""
        return self.model.cache_values_per_token * self.weights.element_bytes

    def workspace_bytes(self, device: str) -> int:
        """Memory besides weights and caches: what libraries take, activations of a prefill chunk, the logits of every row, and on
        a GPU what only kernels there need."""
        on_gpu = self.gpu_bytes if DEVICES[device].is_gpu else 0
        return CONTEXT_BYTES + LIBRARY_BYTES + self._activation_bytes + on_gpu

    @property
    def rank_bytes(self) -> int:
        """``workspace_bytes`` on a GPU without the CUDA context."""
        return LIBRARY_BYTES + self._activation_bytes + self.gpu_bytes

    @property
    def gpu_bytes(self) -> int:
        """Buffers of NCCL and cuBLAS, captured graphs, and slices of quantized matrices while they are widened: in 8 bits of the
        layers, in the graphs' memory, and of the head; in 4 bits of the head alone."""
        widenings = {None: 0, "int4": 1, "int8": 2}[self.weights.quantize]
        return NCCL_BYTES + CUBLAS_BYTES + self.graph_bytes + widenings * WIDENED_VALUES * self.weights.element_bytes

    @property
    def graph_bytes(self) -> int:
        """Memory that the graphs of a stage allocate beside its weights, once, since they share it: the activations of the
        largest forward that is captured, a layer's copies of the keys and values that it reads, and for every cell of its rows
        and slots the bias of every query head of a group, twice while it is made. Not measured on a GPU.
        """
        group = max(layer.group for layer in self.model.layers)
        values = CAPTURED_ROWS * self._row_values + CAPTURED_SLOTS * self.model.cache_values_per_token
        return (values + 2 * group * CAPTURED_CELLS) * self.weights.element_bytes

    @property
    def _activation_bytes(self) -> int:
        """With the keys and values that a layer computes from latents, of all slots."""
        expanded = max(layer.num_heads * (layer.key_dim + layer.value_dim) * bool(layer.latents) for layer in self.model.layers)
        values = max(self.rows, PREFILL_ROWS) * self._row_values + self.rows * self.model.vocab_size + self._slots * expanded
        return values * self.weights.element_bytes

    @property
    def _row_values(self) -> int:
        """Activations of one row that a layer holds at a time."""
        return 4 * self.model.hidden_size + 3 * self.model.inner_size

    def weight_bytes(self, layers: int, first: bool, last: bool) -> int:
        """Weights of a stage: its layers, the embedding on the first stage, norm and head on the last. A tied head is stored
        twice unless one stage is both."""
        embedding, norm = self.model.embedding_parameters, self.model.hidden_size
        shared = first and last and self.model.tie_word_embeddings
        tables = embedding * (first + last - shared) * self.weights.table_bytes
        in_layers = layers * self.model.layer_parameters * self.weights.layer_bytes
        return round(in_layers + tables + norm * last * self.weights.element_bytes)

    def pass_time(self, device: DeviceSpec, layers: int, last: bool) -> PassTime:
        """One pass through a stage. Of the embedding it reads only a few rows, which do not count."""
        head = last * (self.model.embedding_parameters + self.model.hidden_size)
        in_layers = layers * self.model.layer_parameters
        return pass_time(device, in_layers, head, layers, self.weights, self.model.cache_values_per_token)

    def room(self, device: str, first: bool, last: bool, taken_bytes: int = 0) -> int:
        """Number of layers that fit on a device beside everything else, of which another rank may have taken a part."""
        other = self.weight_bytes(0, first, last) + self.workspace_bytes(device) + taken_bytes
        return max(0, (self.memory_bytes(device) - other) // (self.weight_bytes(1, False, False) + self.layer_kv_bytes))
