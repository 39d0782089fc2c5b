"""Costs of a model's parts on a device: bytes of weights, caches and activations, milliseconds of a pass or a transfer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from pipedec.checkpoints import KnownTensors
from pipedec.core.limits import CAPTURED_NUMBERS, CAPTURED_ROWS
from pipedec.core.stage_message import Load
from pipedec.families import ExpertsShape, Layer, ModelConfig, RecurrentShape, Shape, StateCounts
from pipedec.formats import WIDENED_VALUES, AllRounded, Formats, WeightFormat, matrix_shape
from pipedec.hardware import DEVICES, DeviceSpec, LinkSpec
from pipedec.plan.held import HeldWeights, as_experts, held, together
from pipedec.plan.roofline import ROW_OVERLAP, PassTime, pass_time
from pipedec.plan.state_memory import NO_STATES

# Assumptions about a rank on a GPU, which the driver's figures of a running rank may correct.
CONTEXT_BYTES = 350_000_000  # the CUDA context, which exists before anything is loaded
LIBRARY_BYTES = 150_000_000  # code of kernels, loaded when it is first used
CUBLAS_BYTES = 2 * 32 * 2**20  # on the stream that computes and on that of the captures: 32 MiB on Hopper, 8 MiB elsewhere
NCCL_BYTES = 2 * 2 * 8 * 4 * 2**20  # two communicators, each with 8 channels to and fro of NCCL_BUFFSIZE, 4 MiB
PREFILL_ROWS = 512  # rows of prompts that enter at a timestep, at the most

_PAYING_ROWS = 4
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class RankTiming:
    """Compute and transfer times of one rank, by its device (see ``speeds``) and the data sheet of its link to the next rank
    (from the last stage, to rank 0).
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
    """Bytes and milliseconds of a model's parts.

    Attributes:
        formats: how weights are kept in memory; by default as the checkpoint has them, unless they are rounded.
        states: what the pools of recurrent layers hold.
        row_overlap: of the experts of rows (see ``ExpertReads``).
        reads_headers: whether the types of tensors count that only the headers of files give. Plans, which must be the same on
            hosts with other parts of the checkpoint, go by the names in its index alone.
    """

    model: ModelConfig
    weights: WeightFormat
    rows: int
    max_model_len: int
    passage: int
    utilization: float = 1.0
    formats: Formats | None = None
    reads_headers: bool = False
    states: StateCounts = NO_STATES
    row_overlap: float = ROW_OVERLAP

    def memory_bytes(self, device: str) -> int:
        """Memory of a device that ranks may take: of a GPU the share that ``gpu_memory_utilization`` gives."""
        spec = DEVICES[device]
        return round(spec.memory_bytes * self.utilization) if spec.is_gpu else spec.memory_bytes

    def kv_bytes(self, layers: range) -> int:
        """Past and tree cache of layers: the context, a tree layer per timestep of a passage, and the layer that enters."""
        return self._slots * self.token_bytes(layers)

    def state_pool_bytes(self, layers: range) -> int:
        """The pools of recurrent layers, and the state after a chunk of a prompt, which is apart until its forward succeeds."""
        states, rows = self.states.allocated
        stash_bytes = sum(layer.stash_bytes(self.weights.element_bytes) for layer in self._recurrent(layers))
        return (states + 1) * self.state_bytes(layers) + rows * stash_bytes

    def state_bytes(self, layers: range) -> int:
        """The state of one request in layers."""
        return sum(layer.state_bytes(self.weights.element_bytes) for layer in self._recurrent(layers))

    def layer_bytes(self) -> list[int]:
        """Weights, caches and states of each layer."""
        layers = [range(layer, layer + 1) for layer in range(len(self._layers))]
        kept = (self.kv_bytes(layer) + self.state_pool_bytes(layer) for layer in layers)
        return [weights.num_bytes + num_bytes for weights, num_bytes in zip(self._layers, kept, strict=True)]

    def _recurrent(self, layers: range) -> tuple[RecurrentShape, ...]:
        """The recurrent ones of these layers."""
        return tuple(layer for layer in self._shapes[layers.start : layers.stop] if isinstance(layer, RecurrentShape))

    @cached_property
    def _shapes(self) -> tuple[Layer, ...]:
        return self.model.layers

    @property
    def _slots(self) -> int:
        return self.max_model_len + self.rows * (self.passage + 1)

    def token_bytes(self, layers: range) -> int:
        """One token in the KV caches of layers."""
        return sum(self._cached[layers.start : layers.stop]) * self.weights.element_bytes

    def workspace_bytes(self, device: str) -> int:
        """Memory besides weights and caches: what libraries take, activations of a prefill chunk, the logits of every row, and on
        a GPU what only kernels there need."""
        on_gpu = self.gpu_bytes if DEVICES[device].is_gpu else 0
        return CONTEXT_BYTES + LIBRARY_BYTES + self._activation_bytes + on_gpu

    @property
    def rank_bytes(self) -> int:
        """``workspace_bytes`` on a GPU without the CUDA context."""
        return LIBRARY_BYTES + self._activation_bytes + self.gpu_bytes

    @cached_property
    def gpu_bytes(self) -> int:
        """Buffers of NCCL and cuBLAS, captured graphs, the splits of a chunk's attention, and slices of quantized matrices
        without a kernel while they are widened: those of the layers, in the graphs' memory, and those of the head.
        """
        widened_bytes = max(layer.widened_bytes for layer in self._layers) + self._ends(False, True).widened_bytes
        split_bytes = max(self.rows, PREFILL_ROWS) * self._split_bytes
        return NCCL_BYTES + CUBLAS_BYTES + self.graph_bytes + split_bytes + widened_bytes * WIDENED_VALUES

    @cached_property
    def graph_bytes(self) -> int:
        """Memory that the graphs of a stage allocate beside its weights, once, since they share it: the activations of the
        largest forward that is captured, the splits of a layer's attention, and the table of its rows. Not measured on a GPU.
        """
        return CAPTURED_ROWS * (self._row_values * self.weights.element_bytes + self._split_bytes) + 4 * CAPTURED_NUMBERS

    @property
    def _split_bytes(self) -> int:
        """One row in the splits of a layer's attention by kernels: float32."""
        return max((4 * one.num_heads * (one.value_dim + 2) * one.num_splits for one in self.model.attention_layers), default=0)

    @cached_property
    def _activation_bytes(self) -> int:
        """With the keys and values that a layer computes from latents, of all slots."""
        attention = self.model.attention_layers
        expanded = max((one.num_heads * (one.key_dim + one.value_dim) * bool(one.latents) for one in attention), default=0)
        values = max(self.rows, PREFILL_ROWS) * self._row_values + self.rows * self.model.vocab_size + self._slots * expanded
        return values * self.weights.element_bytes

    @property
    def _row_values(self) -> int:
        """Activations of one row that a layer holds at a time: with values, gates and outputs of a recurrence, what goes into its
        convolution and comes out, and what goes through its experts.
        """
        recurrent = self._recurrent(range(self.model.num_hidden_layers))
        values = max((3 * (layer.num_heads * layer.value_dim + layer.channels) for layer in recurrent), default=0)
        return 4 * self.model.hidden_size + 3 * self.model.inner_size + values + self._routed_values

    @property
    def _routed_values(self) -> int:
        """Activations of one row in its experts."""
        routed = [(layer, shape.top_k) for layer, shape in enumerate(self.model.experts) if shape is not None]
        if not routed:
            return 0
        layer, top_k = max(routed, key=itemgetter(1))
        widest = max(size for shape in self.model.expert_tensors(layer).values() for size in shape[-2:])
        return 5 * top_k * widest

    def weight_bytes(self, layers: range, first: bool, last: bool) -> int:
        """Weights of a stage: its layers, the embedding on the first stage, norm and head on the last. A tied head is stored
        twice unless one stage is both."""
        return self._ends(first, last).num_bytes + sum(self._layers[layer].num_bytes for layer in layers)

    def pass_time(self, device: DeviceSpec, layers: range, last: bool) -> PassTime:
        """One pass through a stage. Of the embedding it reads only a few rows, which do not count."""
        read = together([*(self._layers[layer] for layer in layers), self._ends(False, last)])
        past_bytes, state_bytes = self.token_bytes(layers), self.state_bytes(layers)
        return pass_time(device, read, self.weights.dtype, len(layers), past_bytes, state_bytes, self.row_overlap)

    def layer_ms(self, device: DeviceSpec) -> list[float]:
        """A pass of ``usual_rows`` rows through each layer alone."""
        states = [self.state_bytes(range(layer, layer + 1)) for layer in range(len(self._layers))]
        layers = list(zip(self._layers, states, strict=True))
        dtype, overlap = self.weights.dtype, self.row_overlap
        times = {one: pass_time(device, one[0], dtype, 1, 0, one[1], overlap).ms(self.usual_rows) for one in set(layers)}
        return [times[one] for one in layers]

    @property
    def usual_rows(self) -> int:
        """Rows of a timestep for which layers are balanced: a whole tree layer, or with routed experts about as many as pay."""
        return min(self.rows, _PAYING_ROWS) if any(self.model.experts) else self.rows

    def room(self, device: str, first: bool, last: bool, taken_bytes: int = 0) -> int:
        """Bytes that a device leaves for layers beside everything else, of which another rank may have taken a part. Below 0 if
        that does not fit."""
        other = self.weight_bytes(range(0), first, last) + self.workspace_bytes(device) + taken_bytes
        return self.memory_bytes(device) - other

    @cached_property
    def _cached(self) -> tuple[int, ...]:
        """Elements of one token in the KV cache of each layer."""
        return tuple(layer.cached.num_values for layer in self._shapes)

    @cached_property
    def _layers(self) -> tuple[HeldWeights, ...]:
        return tuple(self._layer(layer, experts) for layer, experts in enumerate(self.model.experts))

    def _layer(self, layer: int, experts: ExpertsShape | None) -> HeldWeights:
        tensors = self.model.layer_tensors(layer)
        if experts is None:
            return self._held(tensors)
        routed = self.model.expert_tensors(layer)
        dense = self._held({name: shape for name, shape in tensors.items() if name not in routed})
        return together([dense, as_experts(experts, self._held(routed))])

    def _ends(self, first: bool, last: bool) -> HeldWeights:
        """Weights that a stage holds beside its layers."""
        model = self.model
        shapes = model.embedding_tensors() if first else {}
        return self._held(shapes | model.norm_tensors() | model.head_tensors(self._tensors.names) if last else shapes)

    def _held(self, shapes: Mapping[str, Shape]) -> HeldWeights:
        """Tensors of a layer's experts that differ in the number of the expert alone are stored alike."""
        known: dict[tuple[str, Shape], HeldWeights] = {}
        parts = []
        for name, shape in shapes.items():
            kind = _EXPERT.sub(".experts.", name), shape
            if kind not in known:
                format = self._tensors.format_of(name, shape, self._formats, self.reads_headers)
                known[kind] = held(format, matrix_shape(name, shape), self.weights)
            parts.append(known[kind])
        return together(parts)

    @cached_property
    def _tensors(self) -> KnownTensors:
        return KnownTensors(self.model)

    @cached_property
    def _formats(self) -> Formats:
        if self.formats is not None:
            return self.formats
        if self.weights.quantize is None:
            return self.model.formats
        tables = self.model.embedding_tensors() | self.model.head_tensors(self._tensors.names)
        return AllRounded(self.weights.quantize, tables, self.model.routers)
