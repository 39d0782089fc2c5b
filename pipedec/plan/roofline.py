"""How long a forward pass takes by the data sheet of its device: a roofline."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from pipedec.hardware import GIGA, DeviceSpec
from pipedec.plan.held import HeldWeights

# Launch overhead of one layer whose kernels are replayed as a CUDA graph: about ten kernels, each followed by a gap of one to
# two microseconds. An assumption, not a data sheet figure: the program replays graphs, but of 21 to 27 kernels per layer, and has
# not been timed on a GPU.
LAUNCH_US_PER_LAYER = 15.0
# Rows that torch's kernel for 4-bit weights in bfloat16 on a GPU multiplies at once (ATen/native/cuda/int4mm.cu,
# tinygemm_m16n8k16_chunk_kernel): each tile of so many rows is a block of its own, which reads and widens all weights again.
INT4_KERNEL_ROWS = 16


@dataclass(frozen=True)
class PassTime:
    """Duration of one forward pass through some layers on a device: a roofline plus kernel launches.

    Attributes:
        read_ms: time to read the weights from memory once, and the state of recurrent layers, which is also written.
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
        return max(self.weights_ms(rows) + past * self.past_ms, rows * self.row_ms) + self.launch_ms

    def weights_ms(self, rows: int) -> float:
        """Milliseconds in which the weights are read for so many rows."""
        return self.read_ms + (rows - 1) // INT4_KERNEL_ROWS * self.reread_ms

    def slowed(self, factor: float) -> PassTime:
        """With every part so many times as long."""
        return PassTime(*(factor * part for part in astuple(self)))

    @property
    def knee_rows(self) -> float:
        """The knee of the roofline: number of rows from which compute takes longer than reading the weights once."""
        at_peak = self.read_ms / self.row_ms
        return min(at_peak, INT4_KERNEL_ROWS) if self.reread_ms else at_peak


def pass_time(
    device: DeviceSpec, weights: HeldWeights, dtype: str, layers: int = 0, past_bytes: int = 0, state_bytes: int = 0
) -> PassTime:
    """A forward pass on ``device`` of rows in ``dtype`` by these weights, those of ``layers`` layers and perhaps of a head.

    ``past_bytes`` are those of one token in the KV caches of the layers, ``state_bytes`` those of one request's state in the
    recurrent ones. Rows of one request are assumed, whose pass reads the state and commits to it. The stashes of rows in flight
    are not counted: those of a tree are small beside a state.
    """
    byte_ms = 1000 / (device.bandwidth_gb_per_s * GIGA)
    return PassTime(
        read_ms=(weights.read_bytes(device.is_gpu) + 2 * state_bytes) * byte_ms,
        row_ms=1000 * 2 * weights.parameters / device.peak_flops(dtype),
        launch_ms=layers * LAUNCH_US_PER_LAYER / 1000,
        past_ms=past_bytes * byte_ms,
        reread_ms=weights.kernel_bytes * byte_ms if device.is_gpu else 0.0,
    )
