"""Training BiTA over the stages of a target: which layers each has, and the memory and the time that it takes.

The numbers are those of float32 parameters and states of AdamW, of frozen weights in the plan's dtype, and of one sample in each
batch that goes through the pipeline (one forward, one backward pass). Nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipedec.checkpoints import KnownTensors, LayerSpan, span_shapes
from pipedec.core.errors import PipedecError
from pipedec.families import ModelConfig, model_by_name
from pipedec.formats import ALL_PLAIN, WeightFormat
from pipedec.hardware import DEVICES, GIGA
from pipedec.plan.costs import CONTEXT_BYTES, CUBLAS_BYTES, LIBRARY_BYTES, NCCL_BYTES, ModelCosts
from pipedec.plan.partition import Plan, StagePlan
from pipedec.plan.placement import balance, explicit_layers

BATCHES_AT_ONCE = 4  # of a step in a pipeline, for each stage
_USABLE = 0.9  # of a device's memory: torch's allocator loses some
_OPTIMIZER_NUMBERS = 4  # of each learned one: itself, its gradient and AdamW's two averages
_LOGITS = 3  # tensors of float32 logits: themselves, their softmax, their gradient
_BATCHES = (4, 32, 128)  # samples of a step; the paper has 128


def training_cut(config: ModelConfig, stages: int) -> list[LayerSpan]:
    """The layers of each stage, with embeddings and head balanced by size. Raises UserError if there are fewer layers."""

    def billions(layers: range, first: bool = False, last: bool = False) -> float:
        span = LayerSpan(layers, first, last)
        return sum(map(prod, span_shapes(config, span, KnownTensors(config).names).values())) / GIGA

    count, ends = config.num_hidden_layers, range(stages)
    of_layers = [billions(range(layer, layer + 1)) for layer in range(count)]
    of_ends = [billions(range(0), end == 0, end == stages - 1) for end in ends]
    layers = explicit_layers(balance([of_layers] * stages, of_ends, [0] * count, [0] * stages), count)
    return [LayerSpan(own, end == 0, end == stages - 1) for end, own in zip(ends, layers, strict=True)]


@dataclass(frozen=True)
class TrainingSample:
    """Rows of a sample in a step: T tokens, R mask rows; Q tokens of the learned prompt; M masks in a group."""

    tokens: int
    mask_rows: int
    prompt_tokens: int
    masks: int

    def kept_bytes(self, model: ModelConfig, layers: range, element_bytes: int) -> int:
        """Activations of the mask rows in these layers that a sample's backward pass needs.

        With frozen matrices of width E, an MLP of width I and H heads of width D, in numbers of s bytes, a layer keeps
        R·(8·E + s·(3·I + 2·H·D + S) + 4·H) + 2·s·S·H·D: for each row the inputs of two norms in float32, what enters the product
        of the MLP's gate, its queries and outputs of attention, its mask over S = Q + T + R slots; and keys and values of all
        slots, repeated for all heads. The ordinary rows keep nothing.
        """
        slots, total = self.prompt_tokens + self.tokens + self.mask_rows, 0
        for number in layers:
            shape, experts = model.attention_layers[number], model.experts[number]
            inner = model.inner_size * (1 if experts is None else experts.top_k)
            of_heads = shape.num_heads * (shape.key_dim + shape.value_dim)
            of_row = 8 * model.hidden_size + element_bytes * (3 * inner + of_heads + slots) + 4 * shape.num_heads
            total += self.mask_rows * of_row + element_bytes * slots * of_heads
        return total


@dataclass(frozen=True)
class TrainingRank:
    """Bytes and milliseconds of a rank of the training.

    Attributes:
        learned_bytes: masks and the prompt of all layers, with gradients and state of AdamW, which all ranks have alike.
        kept_bytes: activations of the samples in flight, kept for their backward passes.
        other_bytes: libraries; messages; the ordinary rows' keys and values; on the last rank logits, on both ends a table of
            float32 embeddings for the Markov table.
        sample_ms: forward and backward passes of a sample, and its transfers to the next rank and back.
    """

    stage: StagePlan
    span: LayerSpan
    weight_bytes: int
    learned_bytes: int
    kept_bytes: int
    other_bytes: int
    sample_ms: float

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.learned_bytes + self.kept_bytes + self.other_bytes

    @property
    def usable_bytes(self) -> int:
        return round(_USABLE * DEVICES[self.stage.placement.device].memory_bytes)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.usable_bytes


def training_ranks(plan: Plan, sample: TrainingSample) -> list[TrainingRank]:
    """The ranks of a training on the devices of a plan's stages. From each rank to the last, a sample is in flight at every rank.
    Raises UserError if there are fewer layers.
    """
    model, weights, count = model_by_name(plan.target), WeightFormat(plan.weights.dtype), len(plan.stages)
    costs = ModelCosts(model, weights, 1, 0, 1, formats=ALL_PLAIN)
    width, rows = model.hidden_size * weights.element_bytes, sample.mask_rows
    prompt = sample.prompt_tokens * costs.token_bytes(range(model.num_hidden_layers)) // weights.element_bytes
    ranks: list[TrainingRank] = []
    for stage, span in zip(plan.stages, training_cut(model, count), strict=True):
        device, in_flight = DEVICES[stage.placement.device], count - len(ranks)
        messages = BATCHES_AT_ONCE * count * (sample.tokens + 2 * rows) + in_flight * (sample.tokens + rows)
        embeddings = model.vocab_size * model.hidden_size * 4 * (span.first or span.last) * (weights.element_bytes < 4)
        logits = _LOGITS * 4 * rows * model.vocab_size * span.last
        libraries = CONTEXT_BYTES + LIBRARY_BYTES + CUBLAS_BYTES + NCCL_BYTES
        tokens_ms = costs.pass_time(device, span.layers, False).ms(sample.tokens)
        rows_ms = costs.pass_time(device, span.layers, span.last).ms(rows)
        sent_ms = 0.0 if span.last else sum(stage.timing.link.transfer_ms(width * n) for n in (sample.tokens + rows, rows))
        ranks.append(
            TrainingRank(
                stage, span, costs.weight_bytes(span.layers, span.first, span.last),
                4 * _OPTIMIZER_NUMBERS * (prompt + sample.masks * model.hidden_size),
                in_flight * sample.kept_bytes(model, span.layers, weights.element_bytes),
                libraries + messages * width + sample.tokens * costs.token_bytes(span.layers) + logits + embeddings,
                tokens_ms + 2 * rows_ms + sent_ms,
            )
        )  # fmt: skip
    return ranks


def training_table(plan: Plan, ranks: list[TrainingRank], sample: TrainingSample) -> Group:
    """One line per rank, and below the time of a step by its number of samples. Ranks that lack memory are red."""
    title = f"Training BiTA: {plan.target} in {plan.weights.dtype}, {len(ranks)} ranks"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in (
        "rank",
        "server",
        "device",
        "layers",
        "weights\nGB",
        "learned\nGB",
        "kept\nGB",
        "other\nGB",
        "total /\nusable GB",
    ):
        table.add_column(heading, justify="left" if heading in ("server", "device") else "right", no_wrap=True)
    table.add_column("sample\nms", justify="right", no_wrap=True)
    for number, rank in enumerate(ranks):
        place, own = rank.stage.placement, rank.span.layers
        parts = rank.weight_bytes, rank.learned_bytes, rank.kept_bytes, rank.other_bytes
        table.add_row(
            str(number), place.host, f"{place.device} #{place.index}", f"{own.start}-{own.stop - 1}",
            *(f"{part / GIGA:.2f}" for part in parts), f"{rank.total_bytes / GIGA:.1f} / {rank.usable_bytes / GIGA:.1f}",
            f"{rank.sample_ms:.0f}", style=None if rank.fits else "red",
        )  # fmt: skip
    slowest_ms = max(rank.sample_ms for rank in ranks)
    steps = [f"  step of {batch:>3} samples   {(batch + len(ranks) - 1) * slowest_ms / 1000:7.1f} s" for batch in _BATCHES]
    rows = f"{sample.tokens:,} tokens and {sample.mask_rows} mask rows, {sample.prompt_tokens} tokens of the learned prompt"
    return Group(table, Text("\n".join([f"Samples of {rows}:", *steps, "  estimated, as the memory is: not run on a GPU yet"])))


def check_fits(ranks: list[TrainingRank]) -> None:
    """Raises PipedecError if a rank lacks memory."""
    if lacking := [str(number) for number, rank in enumerate(ranks) if not rank.fits]:
        raise PipedecError(f"ranks {', '.join(lacking)} lack memory for training: use more or larger GPUs, or --dtype bfloat16")
