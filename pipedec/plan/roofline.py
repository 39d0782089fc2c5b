"""How long a forward pass takes: a roofline by the data sheet of its device and what ``speeds`` knows of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from pipedec.core.limits import CAPTURED_ROWS, KERNEL_ROWS
from pipedec.hardware import GIGA, DeviceSpec
from pipedec.plan.held import HeldWeights
from pipedec.plan.speeds import speed_of

# The share of its experts that a further row of a request has in common with the other rows of a batch, beyond what independent
# routing would give. mlx-lm measured 25.7 % between neighbouring tokens of GLM-4.7-Flash.
ROW_OVERLAP = 0.25
_NEARLY_MOST = 0.9  # of the rows per millisecond


@dataclass(frozen=True)
class ExpertReads:
    """Reading the routed experts of layers of one shape.

    Attributes:
        all_ms: time to read all experts of these layers once.
        reread_ms: time to read all of them again, for each further ``KERNEL_ROWS`` rows of an expert; 0 if one reading
            serves all rows.
        num_experts, top_k: of each layer; experts of a row.
        overlap: share of its experts that a further row has in common with the others, beyond independent routing, in [0, 1).
    """

    all_ms: float
    reread_ms: float
    num_experts: int
    top_k: int
    overlap: float

    def distinct(self, rows: int) -> float:
        """Expected experts of a layer that any of the rows, at least one, is routed to."""
        independent = 1 + (rows - 1) * (1 - self.overlap)
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** independent)

    def ms(self, rows: int) -> float:
        """Milliseconds in which the experts of so many rows are read: concave up to all experts."""
        rows = max(rows, 1)
        distinct = self.distinct(rows)
        tiles = ceil(rows * self.top_k / distinct / KERNEL_ROWS)
        return distinct / self.num_experts * (self.all_ms + (tiles - 1) * self.reread_ms)

    def slowed(self, factor: float) -> ExpertReads:
        return replace(self, all_ms=factor * self.all_ms, reread_ms=factor * self.reread_ms)


@dataclass(frozen=True)
class PassTime:
    """Duration of one forward pass through some layers on a device: a roofline plus what each layer takes beside its weights.

    Attributes:
        read_ms: time to read the weights that every row computes with from memory once, and the state of recurrent layers, which
            is also written.
        row_ms: time to multiply one row by them, and by its own experts, at the peak rate.
        launch_ms: time of the layers beside reading: kernels that read no weights, and launches.
        past_ms: time to read one token's keys and values in the KV cache.
        reread_ms: time to read weights again for each further ``KERNEL_ROWS`` rows; 0 if one reading serves all rows.
        experts: the routed experts, of which a pass reads those of its rows.
    """

    read_ms: float
    row_ms: float
    launch_ms: float
    past_ms: float = 0.0
    reread_ms: float = 0.0
    experts: tuple[ExpertReads, ...] = ()

    def ms(self, rows: int, past: int = 0) -> float:
        """Milliseconds for ``rows`` rows that attend to ``past`` tokens in all, each read once for its request.

        Memory-bound up to ``knee_rows`` (or more, with much past or with experts), then compute-bound. The products of queries
        with keys and values are not counted: they are small beside the weights' at the lengths planned for.
        """
        return max(self.weights_ms(rows) + past * self.past_ms, rows * self.row_ms) + self.launch_ms

    def weights_ms(self, rows: int) -> float:
        """Milliseconds in which the weights are read for so many rows."""
        dense_ms = self.read_ms + (rows - 1) // KERNEL_ROWS * self.reread_ms
        return dense_ms + sum(experts.ms(rows) for experts in self.experts)

    def slowed(self, factor: float) -> PassTime:
        """With every part so many times as long."""
        return PassTime(
            factor * self.read_ms, factor * self.row_ms, factor * self.launch_ms, factor * self.past_ms, factor * self.reread_ms,
            tuple(experts.slowed(factor) for experts in self.experts),
        )  # fmt: skip

    @property
    def knee_rows(self) -> float:
        """The knee of the roofline: number of rows from which compute takes longer than reading the weights once. With routed
        experts it is 1: a second row already reads more of them.
        """
        if self.experts:
            return 1.0
        at_peak = self.read_ms / self.row_ms
        return min(at_peak, KERNEL_ROWS) if self.reread_ms else at_peak

    @property
    def room_rows(self) -> float:
        """Rows that a pass should have at most. Up to the knee they take no longer. With routed experts every row takes longer:
        the budget weighs each, and this bounds chunks of prompts. It is the fewest rows, a power of two, of which the most, or
        nearly, are computed per millisecond.
        """
        if not self.experts:
            return self.knee_rows
        speeds = {rows: rows / self.ms(rows) for rows in (1 << power for power in range(CAPTURED_ROWS.bit_length()))}
        return min(rows for rows, speed in speeds.items() if speed >= _NEARLY_MOST * max(speeds.values()))


def expected_ms(passes: Iterable[PassTime]) -> tuple[float, ...]:
    """Milliseconds of the slowest of these passes with 1, 2, … rows, as many as one may have. Empty without routed experts, where
    rows up to the knee cost nothing.
    """
    passes = tuple(passes)
    if not any(one.experts for one in passes):
        return ()
    return tuple(max(one.ms(rows) for one in passes) for rows in range(1, 2 * CAPTURED_ROWS + 1))


def pass_time(
    device: DeviceSpec, weights: HeldWeights, dtype: str, layers: int = 0, past_bytes: int = 0, state_bytes: int = 0,
    overlap: float = ROW_OVERLAP,
) -> PassTime:  # fmt: skip
    """A forward pass on ``device`` of rows in ``dtype`` by these weights, those of ``layers`` layers and perhaps of a head.

    ``past_bytes`` are those of one token in the KV caches of the layers, ``state_bytes`` those of one request's state in the
    recurrent ones. Rows of one request are assumed, whose pass reads the state and commits to it. The stashes of rows in flight
    are not counted: those of a tree are small beside a state. ``overlap`` as of ``ExpertReads``. Raises UserError as
    ``speed_of``.
    """
    speed = speed_of(device.name)
    byte_ms = 1000 / (device.bandwidth_gb_per_s * GIGA * speed.bandwidth_share)

    def reread_ms(part: HeldWeights) -> float:
        return part.kernel_bytes * byte_ms if device.is_gpu else 0.0

    dense = weights.dense
    of_row = sum(part.parameters * shape.top_k / shape.num_experts for shape, part in weights.experts)
    return PassTime(
        read_ms=(dense.read_bytes(device.is_gpu) + 2 * state_bytes) * byte_ms,
        row_ms=1000 * 2 * (dense.parameters + of_row) / device.peak_flops(dtype),
        launch_ms=layers * speed.layer_us / 1000,
        past_ms=past_bytes * byte_ms,
        reread_ms=reread_ms(dense),
        experts=tuple(
            ExpertReads(part.read_bytes(device.is_gpu) * byte_ms, reread_ms(part), shape.num_experts, shape.top_k, overlap)
            for shape, part in weights.experts
        ),
    )
