"""Captured forwards: a stage's computation is recorded once for each number of rows and then replayed as one graph.

Owns the buckets, the tensors that the graphs read and write, and when a forward is captured. A bucket holds any smaller forward,
over pasts of any length (see ``row_tables``). Padding rows are harmless: their keys and values go to a slot that no request has,
and no row of a request attends to them. Knows neither layers nor weights; CUDA only in ``CudaCapture``. R includes padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.config.environment import captures_graphs
from pipedec.core.limits import CAPTURED_NUMBERS, CAPTURED_ROWS
from pipedec.model.attention import LayersShape, Rows, TableAttention
from pipedec.model.cache import KVPool
from pipedec.model.kernels.language import has_kernels
from pipedec.model.row_tables import MOST_REQUESTS, RowTables, entries_size
from pipedec.model.rows import LaneRows
from pipedec.model.table_recurrence import TableRecurrence

_WARM_UPS = 2  # runs before a capture, in which libraries allocate their memory

Run = Callable[[], None]
Capture = Callable[[Run], Run]  # takes a function that reads and writes tensors in fixed places; returns one that replays it
NewCapture = Callable[[torch.device], Capture | None]  # how forwards on a device are captured; None: not at all
Places = tuple[Tensor, Tensor]  # positions and lengths (see ``Rows``)
Layers = Callable[[Tensor, Rows], Tensor]


class CaptureError(Exception):
    """A forward cannot be captured."""


def bucket_of(lanes: Sequence[LaneRows]) -> int | None:
    """The rows of the bucket in which these are computed, a power of two; None if they are too many to be captured, or, with
    recurrent layers, of a prompt, after which states are kept aside.
    """
    if lanes[0].cache.states is not None and any(lane.visibility is None for lane in lanes):
        return None
    rows = 1 << (sum(lane.num_rows for lane in lanes) - 1).bit_length()
    is_small = rows <= CAPTURED_ROWS and len(lanes) <= MOST_REQUESTS and entries_size(lanes) <= CAPTURED_NUMBERS
    return rows if is_small else None


class CapturedGraphs:
    """The graphs of one stage in one pool.

    A forward is captured when its bucket first occurs in this stage's turn; before that it is computed uncaptured. All graphs
    read the same buffers and write the same output, so forwards follow each other on the device.

    Args:
        capture: how forwards are captured.

    Attributes:
        pool: the pool whose addresses the graphs contain.
        turn: (index, number of turns): forward number i may be captured if i % turns == index; (0, 1) for each.
    """

    def __init__(self, shape: LayersShape, pool: KVPool, capture: Capture) -> None:
        self.pool = pool
        self.turn = 0, 1
        self._num_forwards = 0
        self._shape, self._capture = shape, capture
        self._buffers: _Buffers | None = None
        self._graphs: dict[int, tuple[_BucketTensors, Run]] = {}

    def bucket_of(self, lanes: Sequence[LaneRows]) -> int | None:
        """The bucket in which these rows are computed; None if they are not captured."""
        bucket, (own, turns) = bucket_of(lanes), self.turn
        self._num_forwards += 1
        return bucket if bucket in self._graphs or self._num_forwards % turns == own else None

    def forward(self, bucket: int, layers: Layers, inputs: Tensor, places: Places, lanes: Sequence[LaneRows]) -> Tensor:
        """Compute the rows of ``lanes`` and write their keys and values: hidden_RE without padding rows.

        Args:
            bucket: from ``bucket_of``.
            layers: computes hidden_RE from inputs and rows: always the same function of tensors, which reads none of their
                values on the host.
            places: of the rows.

        Raises:
            CaptureError: the graph cannot be captured.
        """
        self._buffers = self._buffers or _Buffers.like(inputs, self._shape, self.pool)
        tensors, replay = self._graphs.get(bucket) or (self._buffers.of_rows(bucket, self._shape, self.pool), None)
        tensors.fill(inputs, places, lanes, self._shape)
        hidden_RE = self._buffers.hidden
        if replay is None:
            output_RE = hidden_RE[:bucket]

            def run() -> None:
                output_RE.copy_(layers(tensors.inputs, tensors.rows(self.pool, self._shape)))

            replay = self._capture(run)
            self._graphs[bucket] = tensors, replay
        replay()
        return hidden_RE[: inputs.shape[0]].clone()


class CudaCapture:
    """Captures as CUDA graphs, which share one pool of memory for intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        """Raises CaptureError if CUDA or a kernel refuses."""
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
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's have no class of their own
            reason = str(error).partition("\n")[0]
            raise CaptureError(f"the layers cannot be captured as a CUDA graph ({reason})") from error
        return graph.replay


def device_capture(device: torch.device) -> Capture | None:
    """How forwards on a device are captured: as CUDA graphs if there are kernels, unless the user has turned them off; on a CPU
    not at all.
    """
    return CudaCapture(device) if device.type == "cuda" and has_kernels(device) and captures_graphs() else None


@dataclass(frozen=True)
class _Buffers:
    """The memory that all buckets of a stage share, for one forward at a time. It never moves."""

    inputs: Tensor  # as of the forward
    places: Tensor  # int64 [2, R], positions and lengths
    table: Tensor  # of ``RowTables``
    hidden: Tensor  # hidden_RE

    @classmethod
    def like(cls, inputs: Tensor, shape: LayersShape, pool: KVPool) -> _Buffers:
        """For rows like ``inputs``."""
        header = RowTables.header_size(CAPTURED_ROWS, MOST_REQUESTS, shape.tile_tokens, pool.states is not None)
        size = header + CAPTURED_NUMBERS
        return cls(
            inputs.new_zeros(CAPTURED_ROWS, *inputs.shape[1:]),
            torch.zeros(2, CAPTURED_ROWS, dtype=torch.int64, device=inputs.device),
            torch.zeros(size, dtype=torch.int32, device=inputs.device),
            torch.zeros(CAPTURED_ROWS, shape.hidden_size, dtype=shape.dtype, device=inputs.device),
        )

    def of_rows(self, rows: int, shape: LayersShape, pool: KVPool) -> _BucketTensors:
        tables = RowTables(self.table, rows, MOST_REQUESTS, shape.tile_tokens, pool.states is not None)
        return _BucketTensors(self.inputs[:rows], self.places[:, :rows], tables)


@dataclass(frozen=True)
class _BucketTensors:
    """The inputs of a forward of one bucket: views of ``_Buffers``, whose values change and whose addresses do not."""

    inputs: Tensor
    places: Tensor
    tables: RowTables

    def fill(self, inputs: Tensor, places: Places, lanes: Sequence[LaneRows], shape: LayersShape) -> None:
        """Enter the rows of a forward."""
        for target, source in zip((self.inputs, *self.places), (inputs, *places), strict=True):
            target[: len(source)].copy_(source)
        self.tables.fill(lanes, shape.has_reach)

    def rows(self, pool: KVPool, shape: LayersShape) -> Rows:
        positions, lengths = self.places
        attention = TableAttention(self.tables, positions, pool, shape)
        recurrence = None if pool.states is None else TableRecurrence(self.tables, pool.states)
        return Rows(positions, lengths, self.tables.slots, pool, attention, recurrence, self.tables.num_rows)
