"""A small draft's forwards on this machine, and how many of them fit into a timestep of the stages that it drafts for.

Weights are random. A forward begins with tokens and ends with the most probable ones on the host, as ``drafting.draft_model`` has
it; a timestep is a step of some layers of the target (``layers``). Knows no pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import torch

from benchmarks.kernels.layers import Roofline, decoders, measure_forward, operations_of, random_stage
from benchmarks.kernels.stopwatch import check_memory, device_named
from benchmarks.output import Device, check_known
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import Row, header
from pipedec.core.errors import UserError
from pipedec.core.limits import MAX_FORWARDS
from pipedec.core.values import check_fields
from pipedec.families import DecoderConfig, model_by_name
from pipedec.flags import Help
from pipedec.formats import DTYPE_BYTES
from pipedec.model import device_capture


@dataclass(frozen=True)
class DraftingConfig:
    """The draft, and the stage that sets a timestep. Raises UserError for a number below 1, or an unknown model or device."""

    draft: Annotated[str, Help("Draft: a model shape's name, or a directory, of which only config.json is read.")] = (
        "llama-3.2-1b"
    )
    rows: Annotated[Counts, Help("Rows per forward of the draft.")] = (1, 8, 32)
    model: Annotated[str, Help(f"Model shape of the stage: {', '.join(decoders())}.", "NAME")] = "llama-3.1-70b"
    layers: Annotated[Positive, Help("Number of layers of the stage.")] = 6
    stage_rows: Annotated[Positive, Help("Rows of a timestep.")] = 16
    past: Annotated[Positive, Help("Accepted tokens before the step.")] = 512
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Help("Data type (default: bfloat16 on CUDA, float32 on CPU).")
    ] = None
    device: Device = "auto"
    repeats: Annotated[Positive, Help("Number of timed runs per forward.")] = 20

    def __post_init__(self) -> None:
        check_fields(self)
        check_known("model", self.model, decoders())

    @property
    def draft_shape(self) -> DecoderConfig:
        """Raises UserError if there is none, or it is not made of pipedec's own parts."""
        shape = model_by_name(self.draft)
        if not isinstance(shape, DecoderConfig):
            raise UserError(f"--draft {self.draft}: not made of pipedec's own parts: take one of {', '.join(decoders())}")
        return shape


def measure_drafting(config: DraftingConfig, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """JSONL rows: ``operation`` ``timestep`` for the stage, then ``draft`` for each number of rows, with ``per_timestep``, the
    number that fits into it; a pipeline computes at most MAX_FORWARDS.

    Raises UserError if there is no such device, or the layers do not fit into its memory.
    """
    device, draft, target = device_named(config.device), config.draft_shape, decoders()[config.model]
    of_target = operations_of(target, config.layers, config.past, device, config.dtype, repeats=config.repeats)
    of_draft = operations_of(draft, draft.num_hidden_layers, config.past, device, config.dtype, repeats=config.repeats)
    dtype = of_target.dtype
    parameters = config.layers * target.layer_parameters + draft.parameters
    check_memory(f"the layers and the draft in {dtype}", parameters * DTYPE_BYTES[dtype], device, "lower --layers")
    roofline = Roofline.of(device, dtype)
    first = header("drafting", asdict(config) | {"dtype": dtype, "device": device.type, "threads": torch.get_num_threads()})
    first |= {"roofline": asdict(roofline)}
    middle = replace(target, num_hidden_layers=config.layers + 2)
    stages = (
        random_stage(middle, range(1, config.layers + 1), of_target.torch_dtype, device),
        random_stage(draft, range(draft.num_hidden_layers), of_target.torch_dtype, device),
    )
    for stage in stages:
        stage.capture = device_capture(device)
    step = measure_forward(stages[0], target, of_target, 1, config.stage_rows, roofline, device)
    rows = [first | step | {"operation": "timestep"}]
    on_row(rows[0])
    for count in config.rows:
        forward = measure_forward(stages[1], draft, of_draft, 1, count, roofline, device)
        fit = min(MAX_FORWARDS, int(step["time_us"]["median"] / forward["time_us"]["median"]))
        rows.append(first | forward | {"operation": "draft", "per_timestep": fit})
        on_row(rows[-1])
    return rows
