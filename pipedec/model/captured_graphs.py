"""Captured forwards: a stage's computation is recorded once for each bucket of sizes and then replayed as one graph.

Owns the tensors that the graphs read and write, and when a forward is captured. Knows neither layers nor weights; CUDA only in
``CudaCapture``. Shapes as in ``buckets``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipedec.config import captures_graphs
from pipedec.core import UserError
from pipedec.hardware import CAPTURED_ROWS
from pipedec.model.attention import LaneRows, LayersShape, RowAttention
from pipedec.model.buckets import Bucket, BucketBuffers, BucketTensors
from pipedec.model.cache import KVPool

MOST_GRAPHS = 256  # of one pool
_WARM_UPS = 2  # runs before a capture, in which libraries allocate their memory

Run = Callable[[], None]
Capture = Callable[[Run], Run]  # takes a function that reads and writes tensors in fixed places; returns one that replays it
NewCapture = Callable[[torch.device], Capture | None]  # how forwards on a device are captured; None: not at all
CosSin = tuple[Tensor, Tensor]
Layers = Callable[[Tensor, CosSin, Tensor, KVPool, RowAttention], Tensor]


class CapturedGraphs:
    """The graphs of one stage in one pool.

    A forward is captured when its bucket first occurs in this stage's turn; before that it is computed uncaptured. All graphs
    read the same buffers and write the same output, so forwards follow each other on the device.

    Args:
        capture: how forwards are captured.
        most_graphs: when there are this many, forwards of other buckets are not captured.

    Attributes:
        pool: the pool whose addresses the graphs contain.
        turn: (index, number of turns) of forwards that may be captured; (0, 1) for each.
    """

    def __init__(self, shape: LayersShape, pool: KVPool, capture: Capture, most_graphs: int = MOST_GRAPHS) -> None:
        self.pool = pool
        self.turn = 0, 1
        self._num_forwards = 0
        self._shape, self._capture, self._most_graphs = shape, capture, most_graphs
        self._buffers: BucketBuffers | None = None
        self._graphs: dict[Bucket, tuple[BucketTensors, Run]] = {}

    def bucket_of(self, lanes: Sequence[LaneRows]) -> Bucket | None:
        """The bucket in which these rows are computed; None if they should not be captured."""
        bucket, (own, turns) = Bucket.of(lanes), self.turn
        self._num_forwards += 1
        may_capture = self._num_forwards % turns == own and len(self._graphs) < self._most_graphs
        return bucket if bucket in self._graphs or may_capture else None

    def forward(self, bucket: Bucket, layers: Layers, inputs: Tensor, cos_sin: CosSin, lanes: Sequence[LaneRows]) -> Tensor:
        """Compute the rows of ``lanes`` and write their keys and values: hidden_RE without padding rows.

        Args:
            bucket: from ``bucket_of``.
            layers: computes hidden_RE from inputs, cosines and sines, slots to write in the pool, and the attention: always the
                same function of tensors, which reads none of their values on the host.
            inputs, cos_sin: of the rows.

        Raises:
            UserError: the graph cannot be captured.
        """
        if self._buffers is None:
            shape = self._shape
            self._buffers = BucketBuffers(inputs, shape.windows, cos_sin[0].shape[1], shape.dtype)
            self._hidden_RE = torch.zeros(CAPTURED_ROWS, shape.hidden_size, dtype=shape.dtype, device=inputs.device)
        known = self._graphs.get(bucket)
        tensors = BucketTensors.of(bucket, self._buffers) if known is None else known[0]
        tensors.fill(inputs, cos_sin, lanes, self.pool.spare_slot)
        replay = self._capture(self._run_of(layers, tensors)) if known is None else known[1]
        replay()
        self._graphs[bucket] = tensors, replay
        return self._hidden_RE[: inputs.shape[0]].clone()

    def _run_of(self, layers: Layers, tensors: BucketTensors) -> Run:
        """The forward to capture: from the buffers to the output."""
        shape, pool, output_RE = self._shape, self.pool, self._hidden_RE[: len(tensors.inputs)]

        def run() -> None:
            attention = tensors.attention(pool, shape.windows, shape.group)
            output_RE.copy_(layers(tensors.inputs, (tensors.cos, tensors.sin), tensors.slots, pool, attention))

        return run


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
                self._warm_up(run)
                with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
                    run()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"the layers cannot be captured as a CUDA graph ({reason}): set PIPEDEC_GRAPHS=off") from error
        return graph.replay

    def _warm_up(self, run: Run) -> None:
        """Run on the stream of the capture. Each run writes the same keys and values to the same slots."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(self._stream)


def device_capture(device: torch.device) -> Capture | None:
    """How forwards on a device are captured: as CUDA graphs unless the user has turned them off; on a CPU not at all."""
    return CudaCapture(device) if device.type == "cuda" and captures_graphs() else None
