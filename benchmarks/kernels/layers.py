"""Large transformer layers on this machine, compared with its roofline: memory bandwidth and peak arithmetic.

Weights are random: only the shape determines how long a step takes. Owns the bound, and the constants that plans take from a
device (``pipedec.plan.speeds``); the layers run ``StageModel``'s code, and ``operations`` times tree and KV cache. Knows no
pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pynvml
import torch

from benchmarks.kernels.operations import OperationsConfig, filled_caches, grown_tree, measure_bookkeeping
from benchmarks.kernels.stopwatch import Stopwatch, check_memory, device_named
from benchmarks.output import Device, check_known
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import Row, header
from pipedec.core.errors import UserError
from pipedec.core.values import check_fields
from pipedec.device import to_host
from pipedec.engine.build import DTYPES
from pipedec.families import KNOWN_MODELS, DecoderConfig, ModelConfig, Shape
from pipedec.flags import Help
from pipedec.formats import DTYPE_BYTES, PLAIN, Format
from pipedec.hardware import DEVICES, GIGA
from pipedec.model import Checkpoint, LaneRows, StageModel, device_capture
from pipedec.model.kernels.language import has_kernels
from pipedec.model.matrices import DenseMatrix
from pipedec.model.weights import Target
from pipedec.plan.speeds import MeasuredSpeed, read_speeds
from pipedec.tree import Visibility

# CUDA names of the devices with a data sheet in ``hardware``. Others are measured (PCIe variants have slower memory).
DATA_SHEETS = {
    "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA RTX A6000": "a6000", "NVIDIA A10": "a10", "NVIDIA L4": "l4", "NVIDIA L40": "l40", "NVIDIA L40S": "l40s",
    "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100-PCIE-40GB": "a100-40", "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
}  # fmt: skip
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
MULTIPLIED_SIZE = {"cuda": 8192, "cpu": 1024}


def decoders() -> dict[str, DecoderConfig]:
    """The known models that are made of pipedec's own parts."""
    return {name: model for name, model in KNOWN_MODELS.items() if isinstance(model, DecoderConfig)}


@dataclass(frozen=True)
class LayersConfig:
    """The layers to measure, and the steps. Raises UserError for a number below 1, or an unknown model, dtype or device.

    Steps have each number of ``rows`` after each number of accepted tokens, ``past``. A CPU reads a KV cache that lies in one run
    of slots in place, and joins several ``runs`` layer by layer.
    """

    model: Annotated[str, Help(f"Model shape: {', '.join(decoders())}.", "NAME")] = "llama-3.1-70b"
    layers: Annotated[Positive, Help("Number of layers of the stage.")] = 6
    rows: Annotated[Counts, Help("Rows per step.")] = (1, 2, 4, 8, 16, 32, 64, 128)
    past: Annotated[Counts, Help("Accepted tokens before the step.")] = (512, 2048, 8192)
    lanes: Annotated[
        tuple[Positive, ...],
        Help("Numbers of requests: a step with one row of each is compared with one of as many rows of one request."),
    ] = ()
    runs: Annotated[Positive, Help("Runs of slots in which each KV cache lies.")] = 1
    tree_rows: Annotated[Counts, Help("Sizes of the trees that are grown and pruned.")] = (32, 448)
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Help("Data type (default: bfloat16 on CUDA, float32 on CPU).")
    ] = None
    device: Device = "auto"
    repeats: Annotated[Positive, Help("Number of timed runs per step.")] = 20

    def __post_init__(self) -> None:
        check_fields(self)
        check_known("model", self.model, decoders())

    @property
    def shape(self) -> DecoderConfig:
        return decoders()[self.model]

    def operations(self, device: torch.device) -> OperationsConfig:
        """The same layers for ``operations``, with dtype and device resolved and the longest past."""
        more = {"sizes": self.tree_rows, "repeats": self.repeats, "runs": self.runs}
        return operations_of(self.shape, self.layers, max(self.past), device, self.dtype, **more)


def operations_of(
    shape: DecoderConfig, layers: int, past: int, device: torch.device, dtype: str | None, **more: Any
) -> OperationsConfig:
    """So many layers of a model for ``operations``; dtype None for bfloat16 on CUDA, float32 on a CPU."""
    layer = shape.attention_layers[0]
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    chosen: Any = dtype or ("bfloat16" if kind == "cuda" else "float32")
    return OperationsConfig(
        past=past, layers=layers, heads=layer.num_heads, kv_heads=layer.num_kv_heads, head_dim=layer.key_dim, dtype=chosen,
        device=kind, **more,
    )  # fmt: skip


@dataclass(frozen=True)
class Roofline:
    """Peak bandwidth and arithmetic of a device; ``source`` is the data sheet, or that they were measured."""

    bytes_per_second: float
    flops_per_second: float
    source: str

    @classmethod
    def of(cls, device: torch.device, dtype: str) -> Roofline:
        """From the data sheet if the device is known, else measured: a large copy and a large matrix product."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        if name in DATA_SHEETS:
            sheet = DEVICES[DATA_SHEETS[name]]
            return cls(sheet.bandwidth_gb_per_s * GIGA, sheet.peak_flops(dtype), sheet.source)
        stopwatch, size = Stopwatch(device, repeats=5), MULTIPLIED_SIZE[device.type]
        source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_us = stopwatch.time_us(lambda: None, lambda _: target.copy_(source))["p10"]
        factor = torch.ones(size, size, dtype=DTYPES[dtype], device=device)
        product_us = stopwatch.time_us(lambda: None, lambda _: factor @ factor)["p10"]
        return cls(2 * source.nbytes / copy_us * 1e6, 2 * size**3 / product_us * 1e6, "a copy and a product measured here")

    def bound_ms(self, num_bytes: float, flops: float) -> tuple[float, str]:
        """Lower bound for reading ``num_bytes`` and computing ``flops``, and what sets it: ``memory`` or ``compute``."""
        read_ms, compute_ms = 1000 * num_bytes / self.bytes_per_second, 1000 * flops / self.flops_per_second
        return max(read_ms, compute_ms), "memory" if read_ms >= compute_ms else "compute"


def measure_layers(config: LayersConfig, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """JSONL rows: ``operation`` ``forward`` for each past and number of rows or lanes, ``products`` of one row with the
    matrices of all layers and the device's entry for plans (``speed``), then those of ``measure_bookkeeping``.

    Raises UserError if there is no such device, or the layers do not fit into its memory.
    """
    device = device_named(config.device)
    operations = config.operations(device)
    weight_bytes = config.layers * config.shape.layer_parameters * DTYPE_BYTES[operations.dtype]
    what = f"{config.layers} layers of {config.model} in {operations.dtype}"
    one_lane = operations.cache_bytes(max(*config.rows, *config.tree_rows, *config.lanes))
    needed = weight_bytes + max(one_lane, max(config.lanes, default=0) * operations.cache_bytes(1))
    check_memory(what, needed, device, "lower --layers, --past or --lanes, or take a smaller --model or --dtype")
    roofline = Roofline.of(device, operations.dtype)
    resolved = {"dtype": operations.dtype, "device": device.type, "threads": torch.get_num_threads()}
    first = header("layers", asdict(config) | resolved)
    first |= {"driver": driver(), "cuda": torch.version.cuda, "roofline": asdict(roofline)}
    rows = []
    for figures in _figures(config, operations, roofline, device):
        rows.append({**first, **figures})
        if figures["operation"] == "products":
            rows[-1]["speed"] = _speed(rows, device)
        on_row(rows[-1])
    return rows


def planned_device(device: torch.device) -> str | None:
    """The name under which plans know this device; None for a GPU without a data sheet."""
    return DATA_SHEETS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def check_entry(path: Path, device: torch.device) -> None:
    """Raise UserError, before anything is measured, unless an entry for this device can be written to ``path``."""
    if planned_device(device) is None:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"--write {path}: plans do not know a {name}: add it to pipedec/hardware.py and to DATA_SHEETS")
    if path.exists():
        read_speeds(path)


def _speed(rows: list[Row], device: torch.device) -> Row | None:
    """The entry of ``speeds.json`` by which a plan has the smallest step as long as it was; None without a data sheet.

    Args:
        rows: the forwards, and last the products.
    """
    name, products = planned_device(device), rows[-1]
    if name is None:
        return None
    step = min((row for row in rows[:-1] if row["lanes"] == 1), key=lambda row: (row["rows"], row["past"]))
    bytes_per_us = products["bytes"] / products["time_us"]["median"]
    layer_us = (step["time_us"]["median"] - step["bytes"] / bytes_per_us) / products["config"]["layers"]
    speed = MeasuredSpeed(
        round(max(layer_us, 0.0), 1), round(bytes_per_us * 1e6 / (DEVICES[name].bandwidth_gb_per_s * GIGA), 3),
        "triton" if has_kernels(device) else "torch", products["config"]["model"], products["config"]["layers"],
        products["config"]["dtype"], products["date"][:10], products["revision"], products["machine"]["torch"],
        products["driver"], f"a step of {step['rows']} after {step['past']} tokens",
    )  # fmt: skip
    return {"device": name, **asdict(speed)}


def driver() -> str | None:
    """The version of the NVIDIA driver, or None where there is none."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def _figures(config: LayersConfig, operations: OperationsConfig, roofline: Roofline, device: torch.device) -> Iterator[Row]:
    # Layers from the middle of a model, without embedding and head.
    model = replace(config.shape, num_hidden_layers=config.layers + 2)
    stage = random_stage(model, range(1, config.layers + 1), operations.torch_dtype, device)
    stage.capture = device_capture(device)
    for past in config.past:
        for rows in config.rows:
            yield measure_forward(stage, config.shape, replace(operations, past=past), 1, rows, roofline, device)
        for lanes in config.lanes:
            of_one, of_many = (
                measure_forward(stage, config.shape, replace(operations, past=past), *sizes, roofline, device)
                for sizes in ((1, lanes), (lanes, 1))
            )
            ratio = float(of_many["time_us"]["median"] / of_one["time_us"]["median"])
            yield of_many | {"one_lane_time_us": of_one["time_us"], "over_one_lane": ratio}
    yield _measure_products(stage, Stopwatch(device, config.repeats))
    del stage
    for size in config.tree_rows:
        yield from measure_bookkeeping(operations, size, device)


class _RandomCheckpoint(Checkpoint):
    """Has every tensor, and random numbers in it."""

    names: Collection[str] = ()

    def __init__(self) -> None:  # it has no files
        pass

    def format_of(self, config: ModelConfig, name: str, shape: Shape) -> Format:
        return PLAIN

    def read_into(self, targets: Mapping[str, Target], progress: Callable[[], None] | None = None) -> None:
        for target in targets.values():
            for tensor in [target] if isinstance(target, torch.Tensor) else target.tensors():
                if tensor.dim() == 1:
                    tensor.fill_(1.0)
                else:
                    tensor.normal_(std=tensor.shape[1] ** -0.5)


def random_stage(model: DecoderConfig, layers: range, dtype: torch.dtype, device: torch.device) -> StageModel:
    """A stage whose weights are random."""
    stage = StageModel(model, layers, dtype, device)
    stage.stack.read(_RandomCheckpoint(), lambda *_: None)
    return stage


@torch.inference_mode()
def _measure_products(stage: StageModel, stopwatch: Stopwatch) -> Row:
    """One row by all matrices of a stage, one after the other, in a graph where forwards are captured."""
    matrices = [DenseMatrix(tensor) for tensor in stage.stack.tensors() if tensor.dim() == 2]
    rows = {width: torch.randn(1, width, dtype=stage.dtype, device=stage.device) for width in {one.shape[1] for one in matrices}}

    def multiply() -> None:
        for matrix in matrices:
            matrix.linear(rows[matrix.shape[1]])

    run = multiply if stage.capture is None else stage.capture(multiply)
    time_us = stopwatch.time_us(lambda: None, lambda _: run())
    return {"operation": "products", "rows": 1, "time_us": time_us, "bytes": sum(one.weight_NK.nbytes for one in matrices)}


def measure_forward(
    stage: StageModel, shape: ModelConfig, operations: OperationsConfig, lanes: int, rows: int, roofline: Roofline,
    device: torch.device,
) -> Row:  # fmt: skip
    """One step through all layers, of ``rows`` tree rows of each of ``lanes`` requests, and its lower bound. A whole model, as a
    draft is, begins with tokens and ends with the most probable ones on the host.
    """
    past, config, num_rows = operations.past, stage.config, lanes * rows
    tree, _ = grown_tree(operations, rows, device)
    caches = filled_caches(operations, rows, device, lanes)
    inputs = torch.zeros(num_rows, dtype=torch.int64, device=device)
    if not stage.is_first:
        inputs = torch.randn(num_rows, config.hidden_size, dtype=stage.dtype, device=device)
    positions_R = tree.positions + past
    visibility = Visibility(tree.tree_mask, past, lambda: positions_R)

    def drop_rows() -> list[LaneRows]:
        for cache in caches:
            cache.reset()
            cache.append(past, to_past=True)
        return [LaneRows(positions_R, cache, visibility) for cache in caches]

    @torch.inference_mode()
    def step(entering: list[LaneRows]) -> None:
        hidden_RE = stage.forward(inputs, entering)
        if stage.is_last:
            to_host(stage.logits(hidden_RE).log_softmax(-1).topk(operations.children).indices)

    time_us = Stopwatch(device, operations.repeats).time_us(drop_rows, step)
    parameters = len(stage.layers) * shape.layer_parameters + (config.hidden_size * config.vocab_size if stage.is_last else 0)
    cached = lanes * len(stage.layers) * (past + rows) * shape.cache_values_per_token
    num_bytes = (parameters + cached) * stage.dtype.itemsize
    layer = config.layers[0]
    attention = 4 * len(stage.layers) * num_rows * (past + rows) * layer.num_heads * layer.key_dim
    flops = 2 * num_rows * parameters + attention
    bound_ms, bound_by = roofline.bound_ms(num_bytes, flops)
    return {
        "operation": "forward", "past": past, "lanes": lanes, "rows": num_rows, "time_us": time_us, "bytes": num_bytes,
        "flops": flops, "bound_us": 1000 * bound_ms, "bound_by": bound_by, "share_of_bound": 1000 * bound_ms / time_us["median"],
    }  # fmt: skip
