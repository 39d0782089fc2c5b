"""Captured forwards: a stage's computation is recorded once for each bucket of sizes and then replayed as one graph.

Owns the buckets, the tensors that the graphs read and write, and when a forward is captured. A bucket holds any smaller forward.
Padding rows are harmless: their keys and values go to a slot that no request has, and no row of a request attends to them.
Knows caches and masks, but neither layers nor weights; CUDA only in ``CudaCapture``. Shapes as in ``Rectangles``; R includes
padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pipedec.config.environment import captures_graphs
from pipedec.core.errors import UserError
from pipedec.core.limits import CAPTURED_CELLS, CAPTURED_ROWS, CAPTURED_SLOTS
from pipedec.families import Reach
from pipedec.model.attention import (
    LayersShape,
    Mask,
    Rectangles,
    Rows,
    attend,
    fill_indices,
    folded_sinks,
    in_reach,
    mask_of,
)
from pipedec.model.cache import KVPool
from pipedec.model.recurrent import RuleInputs, Stashes, convolved, delta_rule, windows
from pipedec.model.rows import LaneRows
from pipedec.model.states import StatePool
from pipedec.tree import Visibility

FEWEST_SLOTS = 128  # that a request in a bucket has
FEWEST_IN_FLIGHT = 32  # rows that were in flight before, of each request in a bucket, if layers are recurrent
MOST_FILLING = 4  # the rectangles may have this many times as many rows as the forward
MOST_GRAPHS = 256  # in one pool
_WARM_UPS = 2  # runs before a capture, in which libraries allocate their memory

Run = Callable[[], None]
Capture = Callable[[Run], Run]  # takes a function that reads and writes tensors in fixed places; returns one that replays it
NewCapture = Callable[[torch.device], Capture | None]  # how forwards on a device are captured; None: not at all
Places = tuple[Tensor, Tensor]  # positions and lengths (see ``Rows``)
Layers = Callable[[Tensor, Rows], Tensor]


class CapturedGraphs:
    """The graphs of one stage in one pool.

    A forward is captured when its bucket first occurs in this stage's turn; before that it is computed uncaptured. All graphs
    read the same buffers and write the same output, so forwards follow each other on the device.

    Args:
        capture: how forwards are captured.
        most_graphs: when there are this many, forwards of other buckets are not captured.

    Attributes:
        pool: the pool whose addresses the graphs contain.
        turn: (index, number of turns): forward number i may be captured if i % turns == index; (0, 1) for each.
    """

    def __init__(self, shape: LayersShape, pool: KVPool, capture: Capture, most_graphs: int = MOST_GRAPHS) -> None:
        self.pool = pool
        self.turn = 0, 1
        self._num_forwards = 0
        self._shape, self._capture, self._most_graphs = shape, capture, most_graphs
        self._buffers: BucketBuffers | None = None
        self._graphs: dict[Bucket, tuple[BucketTensors, Run]] = {}

    def bucket_of(self, lanes: Sequence[LaneRows]) -> Bucket | None:
        """The bucket in which these rows are computed; None if they are not captured."""
        bucket, (own, turns) = Bucket.of(lanes), self.turn
        self._num_forwards += 1
        may_capture = self._num_forwards % turns == own and len(self._graphs) < self._most_graphs
        return bucket if bucket in self._graphs or may_capture else None

    def forward(self, bucket: Bucket, layers: Layers, inputs: Tensor, places: Places, lanes: Sequence[LaneRows]) -> Tensor:
        """Compute the rows of ``lanes`` and write their keys and values: hidden_RE without padding rows.

        Args:
            bucket: from ``bucket_of``.
            layers: computes hidden_RE from inputs and rows: always the same function of tensors, which reads none of their
                values on the host.
            places: of the rows.

        Raises:
            UserError: the graph cannot be captured.
        """
        if self._buffers is None:
            shape = self._shape
            self._buffers = BucketBuffers(inputs, shape.masks, self.pool.states is not None)
            self._hidden_RE = torch.zeros(CAPTURED_ROWS, shape.hidden_size, dtype=shape.dtype, device=inputs.device)
        tensors, replay = self._graphs.get(bucket) or (BucketTensors.of(bucket, self._buffers), None)
        tensors.fill(inputs, places, lanes, self.pool)
        if replay is None:
            pool, shape, output_RE = self.pool, self._shape, self._hidden_RE[: bucket.rows]

            positions, lengths = tensors.positions

            def run() -> None:
                rows = Rows(
                    positions, lengths, tensors.slots, pool, tensors.attention(pool, shape), tensors.recurrence(pool.states)
                )
                output_RE.copy_(layers(tensors.inputs, rows))

            replay = self._capture(run)
            self._graphs[bucket] = tensors, replay
        replay()
        return self._hidden_RE[: inputs.shape[0]].clone()


class CudaCapture:
    """Captures as CUDA graphs, which share one pool of memory for intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        """Raises UserError if CUDA refuses."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self._device):
                current = torch.cuda.current_stream()
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):  # each run writes the same keys and values to the same slots
                    for _ in range(_WARM_UPS):
                        run()
                current.wait_stream(self._stream)
                with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
                    run()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"the layers cannot be captured as a CUDA graph ({reason}): set PIPEDEC_GRAPHS=off") from error
        return graph.replay


def device_capture(device: torch.device) -> Capture | None:
    """How forwards on a device are captured: as CUDA graphs unless the user has turned them off; on a CPU not at all."""
    return CudaCapture(device) if device.type == "cuda" and captures_graphs() else None


@dataclass(frozen=True)
class Bucket:
    """The sizes of a forward, each rounded up to a power of two."""

    rows: int  # R, of all requests together
    requests: int  # B
    most_rows: int  # M, of any request
    most_slots: int  # N, of any request
    in_flight: int = 0  # F, rows of any request that were in flight before; 0 without recurrent layers

    @classmethod
    def of(cls, lanes: Sequence[LaneRows]) -> Bucket | None:
        """The smallest bucket that holds these rows; None for too many rows, or requests of very uneven sizes, and, with
        recurrent layers, chunks of prompts or rows of several decode threads.
        """
        has_states = lanes[0].cache.states is not None
        if has_states and any(lane.visibility is None or lane.threads is not None for lane in lanes):
            return None
        bucket = cls(
            _power(sum(lane.num_rows for lane in lanes)),
            _power(len(lanes)),
            _power(max(lane.num_rows for lane in lanes)),
            _power(max(FEWEST_SLOTS, *(lane.num_slots for lane in lanes))),
            _power(max(FEWEST_IN_FLIGHT, *(lane.cache.tree_length for lane in lanes))) if has_states else 0,
        )
        return bucket if bucket.is_small else None

    @classmethod
    def of_one(cls, rows: int, slots: int) -> Bucket:
        """The bucket of a single request, even if it is not small."""
        return cls(_power(rows), 1, _power(rows), _power(max(FEWEST_SLOTS, slots)))

    @property
    def is_small(self) -> bool:
        """Whether the buffers are large enough for it, and little of it is padding."""
        in_rectangles, num_slots = self.requests * self.most_rows, self.requests * self.most_slots
        if self.requests * self.in_flight > CAPTURED_SLOTS or in_rectangles * (self.in_flight + self.most_rows) > CAPTURED_CELLS:
            return False
        if self.rows > CAPTURED_ROWS or num_slots > CAPTURED_SLOTS or in_rectangles * self.most_slots > CAPTURED_CELLS:
            return False
        return in_rectangles <= MOST_FILLING * self.rows


def usual_sizes(rows: int, slots: int) -> list[tuple[int, int]]:
    """(Rows, slots) of forwards of one request, ascending by slots: one for each bucket up to this size. Both are at least 1."""
    counts = [min(1 << exponent, rows) for exponent in range(_power(rows).bit_length())]
    contexts = [min(FEWEST_SLOTS << exponent, slots) for exponent in range(max(_power(slots) // FEWEST_SLOTS, 1).bit_length())]
    sizes = [(count, context) for context in contexts for count in counts if count <= context]
    return [size for size in sizes if Bucket.of_one(*size).is_small]


class BucketBuffers:
    """The memory that all buckets of a stage share, for one forward at a time of rows like ``inputs``. It never moves."""

    def __init__(self, inputs: Tensor, masks: Sequence[Mask], has_states: bool) -> None:
        device = inputs.device
        self.reaches = tuple(dict.fromkeys(reach for reach, _ in masks))
        self.inputs = torch.zeros((CAPTURED_ROWS, *inputs.shape[1:]), dtype=inputs.dtype, device=device)
        self.places = torch.zeros(2, CAPTURED_ROWS, dtype=torch.int64, device=device)
        self.indices = torch.zeros((2 + MOST_FILLING) * CAPTURED_ROWS + CAPTURED_SLOTS, dtype=torch.int64, device=device)
        self.seen = torch.zeros(len(self.reaches), CAPTURED_CELLS, dtype=torch.bool, device=device)
        self.states: tuple[Tensor, Tensor] | None = None  # the memory of ``RecurrentPlaces``: indices, masks
        if has_states:
            size = 2 * CAPTURED_ROWS + CAPTURED_SLOTS
            self.states = self.indices.new_zeros(size), torch.zeros(CAPTURED_CELLS, dtype=torch.bool, device=device)


@dataclass(frozen=True)
class BucketTensors:
    """The inputs of a forward of one bucket: views of ``BucketBuffers``, whose values change and whose addresses do not."""

    bucket: Bucket
    inputs: Tensor  # int64 [R], or hidden_RE
    positions: Tensor  # int64 [2, R], positions and lengths (see ``Rows``)
    indices: Tensor  # int64, the memory of ``slots`` and ``rectangles``
    slots: Tensor  # int64 [R], where keys and values are written in the pool
    rectangles: Rectangles  # with T = R
    seen: Mapping[Reach | None, Tensor]  # for each reach, bool [B, M, N]: the slots of its request that a row attends to
    places: RecurrentPlaces | None  # of recurrent layers

    @classmethod
    def of(cls, bucket: Bucket, buffers: BucketBuffers) -> BucketTensors:
        rows, size = bucket.rows, (bucket.requests, bucket.most_rows, bucket.most_slots)
        indices = buffers.indices[: 2 * rows + bucket.requests * (bucket.most_rows + bucket.most_slots)]
        slots, rectangles = _split(indices, bucket)
        seen = {reach: part[: size[0] * size[1] * size[2]].view(size)
                for reach, part in zip(buffers.reaches, buffers.seen, strict=True)}  # fmt: skip
        places = None if buffers.states is None else RecurrentPlaces.of(bucket, *buffers.states)
        return cls(bucket, buffers.inputs[:rows], buffers.places[:, :rows], indices, slots, rectangles, seen, places)

    def fill(self, inputs: Tensor, places: Places, lanes: Sequence[LaneRows], pool: KVPool) -> None:
        """Enter the rows of a forward. Padding rows write to slots that no request has, and replace those of earlier forwards.

        Indices are copied all at once, from other memory each time: the host does not wait for a device that still reads them.
        """
        num_rows = sum(lane.num_rows for lane in lanes)
        for target, source in zip((self.inputs, *self.positions), (inputs, *places), strict=True):
            target[:num_rows].copy_(source)
        host = torch.zeros(len(self.indices), dtype=torch.int64, pin_memory=self.indices.device.type == "cuda")
        slots, rectangles = _split(host, self.bucket)
        slots.fill_(pool.spare_slot)
        starts = accumulate((lane.num_rows for lane in lanes), initial=0)
        rows = [range(start, start + lane.num_rows) for start, lane in zip(starts, lanes, strict=False)]
        for own, lane in zip(rows, lanes, strict=True):
            fill_indices(slots[own.start : own.stop], lane.cache.next_slots(lane.num_rows))
        rectangles.fill(rows, [lane.slots() for lane in lanes])
        self.indices.copy_(host, non_blocking=True)
        for reach, seen_BMN in self.seen.items():
            seen_BMN.zero_()
            for lane, seen_MN in zip(lanes, seen_BMN, strict=False):
                _mark_lane(seen_MN[: lane.num_rows], lane, reach)
        if self.places is not None and pool.states is not None:
            self.places.fill(lanes, pool.states)

    def recurrence(self, states: StatePool | None) -> RectangleRecurrence | None:
        """Recurrence of the rows that were entered."""
        return None if self.places is None or states is None else RectangleRecurrence(self.rectangles, states, self.places)

    def attention(self, pool: KVPool, shape: LayersShape) -> RectangleAttention:
        """Attention of the rows that were entered."""
        biases = {}
        for reach, group in shape.masks:
            seen_BMN = self.seen[reach]
            bias_BMN = torch.zeros_like(seen_BMN, dtype=shape.dtype).masked_fill_(~seen_BMN, -torch.inf)
            biases[reach, group] = bias_BMN.repeat_interleave(group, 1)[:, None]
        return RectangleAttention(self.rectangles, pool, shape, biases)


class RectangleAttention:
    """Attention of a forward's rows in one call per layer, over copies of the slots that they attend to.

    Args:
        biases: for each mask, [B, 1, M·G, N], 0 or −inf.
    """

    def __init__(self, rectangles: Rectangles, pool: KVPool, shape: LayersShape, biases: Mapping[Mask, Tensor]) -> None:
        self._rectangles, self._pool, self._layers, self._biases = rectangles, pool, shape.layers, biases

    def attend(self, q_RHD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        """See ``RowAttention``."""
        return self._attend(q_RHD, *self._pool.gathered(layer, self._rectangles.slots), layer, sinks_H)

    def latents(self, layer: int) -> tuple[Tensor, Tensor]:
        """See ``RowAttention``; with padding."""
        first, second = self._pool.gathered(layer, self._rectangles.slots)
        return first.flatten(0, 2)[None], second.flatten(0, 2)[None]

    def attend_expanded(self, q_RHD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, layer: int) -> Tensor:
        """See ``RowAttention``."""
        requests = len(self._rectangles.slots)
        keys, values = (part.unflatten(1, (requests, -1)).transpose(0, 1) for part in (keys_KSD, values_KSD))
        return self._attend(q_RHD, keys, values, layer, None)

    def _attend(self, q_RHD: Tensor, keys: Tensor, values: Tensor, layer: int, sinks_H: Tensor | None) -> Tensor:
        """Over keys and values [B, K, N, D]."""
        shape, rectangles, kv_heads = self._layers[layer], self._rectangles, keys.shape[1]
        sinks = None if sinks_H is None else folded_sinks(sinks_H, kv_heads, rectangles.rows.shape[1])
        out = attend(rectangles.folded(q_RHD, kv_heads), keys, values, self._biases[mask_of(shape)], shape, sinks)
        return rectangles.unfolded(out, q_RHD.shape[1])


@dataclass(frozen=True)
class RecurrentPlaces:
    """Where the rows of a bucket and their ancestors are in the memory of recurrent layers."""

    indices: Tensor  # int64, the memory of the next three
    states: Tensor  # int64 [B], of each request
    older: Tensor  # int64 [B, F], stashes of the rows that were in flight before
    own: Tensor  # int64 [R], stashes of the rows
    seen: Tensor  # bool [B, M, F + M]: ancestors of a row, and itself

    @classmethod
    def of(cls, bucket: Bucket, indices: Tensor, seen: Tensor) -> RecurrentPlaces:
        size = bucket.requests, bucket.most_rows, bucket.in_flight + bucket.most_rows
        sizes = [bucket.requests, bucket.requests * bucket.in_flight, bucket.rows]
        indices = indices[: sum(sizes)]
        states, older, own = indices.split(sizes)
        return cls(indices, states, older.view(bucket.requests, -1), own, seen[: size[0] * size[1] * size[2]].view(size))

    def fill(self, lanes: Sequence[LaneRows], pool: StatePool) -> None:
        """Enter rows, as ``BucketTensors.fill`` does."""
        pinned = torch.zeros(len(self.indices), dtype=torch.int64, pin_memory=self.indices.device.type == "cuda")
        states, older, own = pinned.split([len(self.states), self.older.numel(), len(self.own)])
        states.fill_(pool.spare_state)
        for stashes, spare in zip((older, own), pool.spare_rows, strict=True):
            stashes.fill_(spare)
        self.seen.zero_()
        first, in_flight = 0, self.older.shape[1]
        for number, lane in enumerate(lanes):
            assert lane.cache.states is not None and lane.visibility is not None
            before, stashes = lane.cache.tree_length, torch.tensor(lane.cache.states.enter(lane.num_rows))
            states[number] = lane.cache.states.of_thread(0)
            older[number * in_flight : number * in_flight + before] = stashes[:before]
            own[first : first + lane.num_rows] = stashes[before:]
            seen_RN = lane.visibility.seen[:, lane.visibility.seen.shape[1] - len(stashes) :]
            self.seen[number, : lane.num_rows, :before] = seen_RN[:, :before]
            self.seen[number, : lane.num_rows, in_flight : in_flight + lane.num_rows] = seen_RN[:, before:]
            first += lane.num_rows
        self.indices.copy_(pinned, non_blocking=True)


class RectangleRecurrence:
    """Recurrence of a forward's rows in one call per layer."""

    def __init__(self, rectangles: Rectangles, pool: StatePool, places: RecurrentPlaces) -> None:
        self._rectangles, self._pool, self._places = rectangles, pool, places

    def convolve(self, layer: int, inputs_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """See ``Recurrence``."""
        memory, places = self._pool.layer(layer), self._places
        older, past = memory.inputs[places.older], memory.past_inputs[places.states]
        windows_BMWC = torch.vmap(windows)(inputs_RC[self._rectangles.rows], past, older, places.seen)
        memory.inputs[places.own] = inputs_RC
        return convolved(windows_BMWC.flatten(0, 1)[self._rectangles.order], weight_CW, bias_C)

    def mix(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor) -> Tensor:
        """See ``Recurrence``."""
        memory, places, rectangles = self._pool.layer(layer), self._places, self._rectangles
        rows = RuleInputs.of(queries, keys, values, decays, rates, memory.states.dtype).part(rectangles.rows)
        older = Stashes.read(memory, places.older)
        out, own = torch.vmap(delta_rule)(rows, memory.states[places.states], older, places.seen)
        Stashes(*(stashes.flatten(0, 1)[rectangles.order] for stashes in own)).write(memory, places.own)
        return out.flatten(0, 1)[rectangles.order].to(values.dtype)


def _power(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def _split(indices: Tensor, bucket: Bucket) -> tuple[Tensor, Rectangles]:
    """Split the ``indices`` of ``BucketTensors`` into views: slots [R], and rectangles."""
    in_rectangles = bucket.requests * bucket.most_rows
    sizes = [bucket.rows, bucket.rows, in_rectangles, bucket.requests * bucket.most_slots]
    slots, order, rows, slots_read = indices.split(sizes)
    return slots, Rectangles(rows.view(bucket.requests, -1), slots_read.view(bucket.requests, -1), order)


def _mark_lane(seen_RN: Tensor, lane: LaneRows, reach: Reach | None) -> None:
    """Mark the slots among ``LaneRows.slots`` that the rows of a request attend to."""
    tokens, prompt = lane.num_tokens, lane.num_prompt_slots
    if tokens:
        _mark(seen_RN[:tokens, prompt:], lane.visibility_of_tokens(), lane.positions[:tokens], reach)
    if lane.num_masks:
        seen_RN[tokens:, :prompt] = True
        _mark(seen_RN[tokens:, prompt:], lane.visibility_of_masks(), lane.positions[tokens:], reach)


def _mark(seen_RN: Tensor, visibility: Visibility, positions_R: Tensor, reach: Reach | None) -> None:
    shared, count = visibility.shared, visibility.seen.shape[1]
    seen_RN[:, :shared] = True
    seen_RN[:, shared : shared + count] = visibility.seen
    if reach is not None:
        seen_RN[:, : shared + count] &= in_reach(visibility, positions_R, reach)
