"""pipedec's own kernels beside torch's operations that compute the same: time, and the share of the memory's bandwidth.

``CASES`` names every kernel of ``pipedec/model/kernels``. A kernel is timed in a graph, where there are graphs, as a stage runs
it, with more operands than the device's cache holds. On a CPU kernels compute in Triton's interpreter if TRITON_INTERPRET=1 is
set; else torch computes both sides. Then times say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from benchmarks.kernels.layers import Roofline, decoders, operations_of
from benchmarks.kernels.operations import filled_caches, grown_tree
from benchmarks.kernels.stopwatch import Stopwatch, device_named
from benchmarks.output import Device, check_known
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import Row, header
from pipedec.core.values import check_fields
from pipedec.engine.build import DTYPES
from pipedec.families import DecoderConfig, Linear, RecurrentShape, StateCounts
from pipedec.families.shapes import KVShape
from pipedec.flags import Help
from pipedec.formats import ROUNDED
from pipedec.model import KVCache, KVPool, LaneRows, device_capture
from pipedec.model.attention import LaneAttention, LayersShape, TableAttention
from pipedec.model.captured_graphs import Capture
from pipedec.model.formats import empty_matrix
from pipedec.model.formats.base import QuantizedMatrix
from pipedec.model.kernels import add_rms_norm, delta_rule, language, matmul, rope_write, short_convolution, silu_mul
from pipedec.model.row_tables import RowTables
from pipedec.model.states import StatePool
from pipedec.tree import Visibility

_CACHE_BYTES = 1 << 28  # no device's cache holds as much
_MOST_COPIES = 64

Way = Callable[[int], Tensor]  # computes with one copy of the operands


@dataclass(frozen=True)
class Size:
    """A step in a layer of a model, of ``rows`` rows of one request after ``past`` tokens."""

    shape: DecoderConfig
    rows: int
    past: int
    dtype: str
    device: torch.device

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPES[self.dtype], device=self.device)

    @property
    def inner(self) -> int:
        """The inner size of the MLP."""
        gate_up = self.shape.decoder(0).parts()["gate_up"]
        assert isinstance(gate_up, Linear)
        return gate_up.outputs[0]


@dataclass(frozen=True)
class Compared:
    """A kernel at one size.

    Attributes:
        num_bytes: what any way must read and write.
        ways: for a number of copies of the operands, the kernel and torch's way.
    """

    num_bytes: int
    ways: Callable[[int], tuple[Way, Way]]


@dataclass(frozen=True)
class Case:
    """A kernel to compare.

    Attributes:
        name: its file in ``pipedec/model/kernels``; a space and a variant may follow.
        compared: prepares it; what it launches must ask ``language.has_kernels``, as the model's code does.
        has_past: whether the past matters; else it is measured after the shortest alone.
    """

    name: str
    compared: Callable[[Size], Compared]
    has_past: bool = False


def tree_attention(size: Size) -> Compared:
    """Beside SDPA over the slots of the request (``LaneAttention``), whose mask is made once per step and not timed."""
    rows, layer, dtype = size.rows, size.shape.attention_layers[0], DTYPES[size.dtype]

    def ways(copies: int) -> tuple[Way, Way]:
        operations = operations_of(size.shape, copies, size.past, size.device, size.dtype)
        tree, _ = grown_tree(operations, rows, size.device)
        (cache,) = filled_caches(operations, rows, size.device, 1)
        positions_R = tree.positions + size.past
        lanes = [LaneRows(positions_R, cache, Visibility(tree.tree_mask, size.past, lambda: positions_R))]
        shape = LayersShape(dict.fromkeys(range(copies), layer), size.shape.hidden_size, dtype)
        q_RHD = torch.randn(rows, layer.num_heads, layer.key_dim, dtype=dtype, device=size.device)
        own = TableAttention(RowTables.of(lanes, shape.tile_tokens, shape.has_reach), positions_R, cache.pool, shape)
        other = LaneAttention(lanes, shape)
        return lambda copy: own.attend(q_RHD, copy), lambda copy: other.attend(q_RHD, copy)

    cached, queries = (size.past + rows) * layer.num_kv_heads, rows * layer.num_heads
    return Compared((cached + queries) * (layer.key_dim + layer.value_dim) * dtype.itemsize, ways)


def norm(size: Size) -> Compared:
    """A residual connection and the norm after it."""
    width = size.shape.hidden_size

    def ways(copies: int) -> tuple[Way, Way]:
        rows, added, weight = (
            size.randn(copies, size.rows, width),
            size.randn(copies, size.rows, width) * 0,
            size.randn(copies, 1, width),
        )

        def way(compute: Callable[..., Tensor]) -> Way:
            return lambda copy: compute(rows[copy], weight[copy, 0], 1e-5, before_RX=added[copy])

        return way(chosen(add_rms_norm.add_rms_norm, add_rms_norm.reference, size)), way(add_rms_norm.reference)

    return Compared((4 * size.rows + 1) * width * DTYPES[size.dtype].itemsize, ways)


def gate(size: Size) -> Compared:
    """The gated activation of an MLP."""
    inner = size.inner

    def ways(copies: int) -> tuple[Way, Way]:
        gate_up = size.randn(copies, size.rows, 2 * inner)
        own = chosen(silu_mul.silu_mul, silu_mul.reference, size)
        return lambda copy: own(gate_up[copy]), lambda copy: silu_mul.reference(gate_up[copy])

    return Compared(3 * size.rows * inner * DTYPES[size.dtype].itemsize, ways)


def rotation(size: Size) -> Compared:
    """Rotated queries; keys and values go to the pool. No reference changes its operands here."""
    layer, rows = size.shape.attention_layers[0], size.rows

    def ways(copies: int) -> tuple[Way, Way]:
        (cache,) = filled_caches(operations_of(size.shape, copies, 1, size.device, size.dtype), rows, size.device, 1)
        heads = layer.num_heads + layer.num_kv_heads
        queries_keys, values = (
            size.randn(copies, rows, heads, layer.key_dim),
            size.randn(rows, layer.num_kv_heads, layer.value_dim),
        )
        cos_sin = size.randn(rows, 1, layer.key_dim), size.randn(rows, 1, layer.key_dim)
        slots = torch.arange(rows, dtype=torch.int32, device=size.device)

        def way(compute: Callable[..., Tensor]) -> Way:
            return lambda copy: compute(queries_keys[copy], values, cos_sin, cache.pool, copy, slots)

        return way(chosen(rope_write.rope_write, rope_write.reference, size)), way(rope_write.reference)

    heads = 2 * (layer.num_heads + 2 * layer.num_kv_heads) + 2
    return Compared(rows * heads * layer.key_dim * DTYPES[size.dtype].itemsize, ways)


def product(size: Size) -> Compared:
    """A projection of an MLP with weights in 4 bits, or in 8 if its inputs do not divide into groups, beside torch's product with
    the same weights widened beforehand.
    """
    inner, width = size.inner, size.shape.hidden_size
    format, bits = (ROUNDED["int8"], 8) if width % 64 else (ROUNDED["int4"], 4)

    def ways(copies: int) -> tuple[Way, Way]:
        rows, wide = size.randn(size.rows, width), list[Tensor]()
        matrices = [empty_matrix(format, inner, width, rows.dtype, size.device) for _ in range(copies)]
        for matrix in matrices:
            assert isinstance(matrix, QuantizedMatrix)
            matrix.fill({"weight": size.randn(inner, width)})
            wide.append(matrix.widened().to(rows.dtype))
        return lambda copy: matrices[copy].linear(rows), lambda copy: matmul.reference(rows, wide[copy])

    return Compared(inner * width * bits // 8 + size.rows * (inner + width) * DTYPES[size.dtype].itemsize, ways)


def recurrent(size: Size) -> tuple[RecurrentShape, Callable[[int], tuple[RowTables, StatePool]]]:
    """A layer with a state for each of the model's heads, two of which share a key; and the step's rows, for so many layers."""
    layer, rows = size.shape.attention_layers[0], size.rows
    heads, keys, width = layer.num_heads, layer.num_heads // 2, layer.key_dim
    shape = RecurrentShape(heads, keys, width, width, 1, (heads + 2 * keys) * width, 4)

    def prepared(copies: int) -> tuple[RowTables, StatePool]:
        states = StatePool([shape] * copies, DTYPES[size.dtype], StateCounts(1, rows), size.device)
        pool = KVPool([KVShape(0, 0, 0)], DTYPES[size.dtype], 1024, device=size.device, states=states)
        tree, _ = grown_tree(operations_of(size.shape, 1, 1, size.device, size.dtype), rows, size.device)
        positions_R = tree.positions
        lane = LaneRows(positions_R, KVCache(pool, ((0, 1024),)), Visibility(tree.tree_mask, 0, lambda: positions_R))
        for number in range(copies):
            for plane in states.layer(number).tensors():
                plane.zero_()
        return RowTables.of([lane], (), False), states

    return shape, prepared


def rule(size: Size) -> Compared:
    """The gated delta rule of a tree's rows, which reads a state for each head."""
    shape, prepared = recurrent(size)

    def ways(copies: int) -> tuple[Way, Way]:
        tables, states = prepared(copies)
        asked = size.randn(copies, 2, size.rows, shape.num_key_heads, shape.key_dim)
        values = size.randn(size.rows, shape.num_heads, shape.value_dim)
        decays, rates = -size.randn(size.rows, shape.num_heads).abs(), size.randn(size.rows, shape.num_heads).sigmoid()

        def way(compute: Callable[..., Tensor]) -> Way:
            return lambda copy: compute(*asked[copy], values, decays, rates, tables, states.layer(copy))

        return way(chosen(delta_rule.gated_delta_rule, delta_rule.reference, size)), way(delta_rule.reference)

    return Compared(4 * shape.num_heads * shape.key_dim * shape.value_dim, ways)


def convolution(size: Size) -> Compared:
    """The short convolution along each row's path."""
    shape, prepared = recurrent(size)

    def ways(copies: int) -> tuple[Way, Way]:
        tables, states = prepared(copies)
        inputs, weight = size.randn(copies, size.rows, shape.channels), size.randn(shape.channels, shape.kernel)

        def way(compute: Callable[..., Tensor]) -> Way:
            return lambda copy: compute(inputs[copy], weight, None, tables, states.layer(copy))

        own = chosen(short_convolution.short_convolution, short_convolution.reference, size)
        return way(own), way(short_convolution.reference)

    return Compared((2 * size.rows + shape.kernel) * shape.channels * DTYPES[size.dtype].itemsize, ways)


def chosen(kernel: Callable[..., Tensor], reference: Callable[..., Tensor], size: Size) -> Callable[..., Tensor]:
    """The kernel where there are any, else its reference."""
    return kernel if language.has_kernels(size.device) else reference


CASES = (
    Case("tree_attention", tree_attention, has_past=True),
    Case("add_rms_norm", norm),
    Case("silu_mul", gate),
    Case("rope_write", rotation),
    Case("matmul", product),
    Case("delta_rule", rule),
    Case("short_convolution", convolution),
)


@dataclass(frozen=True)
class ComparisonConfig:
    """The sizes at which kernels are compared. Raises UserError for a number below 1, or an unknown model, kernel or device."""

    model: Annotated[str, Help(f"Model shape: {', '.join(decoders())}.", "NAME")] = "llama-3.1-70b"
    rows: Annotated[Counts, Help("Rows per step.")] = (1, 16, 64)
    past: Annotated[Counts, Help("Accepted tokens before the step.")] = (512, 4096, 16384)
    only: Annotated[
        tuple[str, ...], Help(f"These kernels: {', '.join(case.name for case in CASES)} (default: all).", "NAME,…")
    ] = ()
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Help("Data type (default: bfloat16 on CUDA, float32 on CPU).")
    ] = None
    device: Device = "auto"
    repeats: Annotated[Positive, Help("Number of timed runs.")] = 20

    def __post_init__(self) -> None:
        check_fields(self)
        check_known("model", self.model, decoders())
        for name in self.only:
            check_known("kernel", name, [case.name for case in CASES])


def compare_kernels(config: ComparisonConfig, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """JSONL rows: one for each kernel and size. Raises UserError if there is no such device."""
    device = device_named(config.device)
    dtype = config.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    first = header("comparison", asdict(config) | {"dtype": dtype, "device": device.type, "threads": torch.get_num_threads()})
    roofline, rows = Roofline.of(device, dtype), list[Row]()
    with interpreted_on_cpu():
        first |= {"roofline": asdict(roofline), "computed_by": computed_by(device)}
        for case in (case for case in CASES if case.name in (config.only or [case.name])):
            for past in config.past if case.has_past else [min(config.past)]:
                for count in config.rows:
                    size = Size(decoders()[config.model], count, past, dtype, device)
                    rows.append({**first, "operation": case.name, "rows": count, "past": past if case.has_past else None})
                    rows[-1] |= _measured(case.compared(size), device, config.repeats, roofline)
                    on_row(rows[-1])
    return rows


def computed_by(device: torch.device) -> str:
    """Who computes the kernels' side: ``kernels``, ``kernels in the interpreter`` or ``torch``."""
    if not language.has_kernels(device):
        return "torch"
    return "kernels" if device.type == "cuda" else "kernels in the interpreter"


@contextmanager
def interpreted_on_cpu() -> Iterator[None]:
    """Where Triton interprets, kernels also compute for tensors of the CPU."""
    before = set(language.devices)
    if language.IS_INTERPRETED:
        language.devices.add("cpu")
    try:
        yield
    finally:
        language.devices.intersection_update(before)


@torch.inference_mode()
def _measured(compared: Compared, device: torch.device, repeats: int, roofline: Roofline) -> Row:
    """The times of both ways per call, their shares of the bandwidth, and by how much their results differ at most, as a share of
    the largest number.
    """
    stopwatch, capture = Stopwatch(device, repeats), device_capture(device)
    copies = min(_MOST_COPIES, -(-_CACHE_BYTES // compared.num_bytes)) if device.type == "cuda" else 1
    ways = compared.ways(copies)
    own, other = (way(0).double() for way in ways)
    times_us = [_time_us(way, copies, stopwatch, capture) for way in ways]
    bound_us = 1e6 * compared.num_bytes / roofline.bytes_per_second
    return {
        "bytes": compared.num_bytes, "copies": copies, "time_us": times_us[0], "torch_time_us": times_us[1],
        "share_of_bandwidth": bound_us / times_us[0]["median"], "torch_share": bound_us / times_us[1]["median"],
        "difference": float((own - other).abs().max() / other.abs().max()),
    }  # fmt: skip


def _time_us(way: Way, copies: int, stopwatch: Stopwatch, capture: Capture | None) -> dict[str, float]:
    """The spread of the microseconds of one call, of one after the other with each copy."""

    def run() -> None:
        for copy in range(copies):
            way(copy)

    timed = run if capture is None else capture(run)
    return {name: us / copies for name, us in stopwatch.time_us(lambda: None, lambda _: timed()).items()}
