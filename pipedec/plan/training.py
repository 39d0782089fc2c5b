"""Training BiTA over the stages of a target: which layers each has, and the memory and the time that it takes.

Nothing is measured. Samples go through the pipeline one by one: T tokens of prompt and answer, then R mask rows, in two passes
forward and one backward, that of the mask rows. S = Q + T + R slots, with Q tokens of the learned prompt.
"""

from __future__ import annotations

from math import prod

from rich import box
from rich.console import Group
from rich.table import Table

from pipedec.checkpoints import KnownTensors, LayerSpan, span_shapes
from pipedec.families import ModelConfig, model_by_name
from pipedec.formats import ALL_PLAIN, WeightFormat
from pipedec.hardware import DEVICES, GIGA
from pipedec.plan.costs import CONTEXT_BYTES, CUBLAS_BYTES, LIBRARY_BYTES, NCCL_BYTES, ModelCosts
from pipedec.plan.partition import Plan
from pipedec.plan.placement import balance, explicit_layers

BATCHES_AT_ONCE = 4  # of a step in a pipeline, for each stage
_USABLE = 0.9  # of a device's memory: torch's allocator loses some
_LEARNED_BYTES = 16  # float32: a number, its gradient and AdamW's two averages
_LOGIT_BYTES = 12  # float32: a logit, its share of the softmax, its gradient
_STEPS = (4, 32, 128)  # samples of a step; the paper has 128
_HEADINGS = ("rank", "server", "device", "layers", "weights", "learned", "kept", "other", "total", "usable", "ms")


def training_cut(config: ModelConfig, stages: int) -> list[LayerSpan]:
    """The layers of each stage, with embeddings and head balanced by size. Raises UserError if there are fewer layers."""
    known = KnownTensors(config).names

    def billions(span: LayerSpan) -> float:
        return sum(map(prod, span_shapes(config, span, known).values())) / GIGA

    count, ends = config.num_hidden_layers, [(stage == 0, stage == stages - 1) for stage in range(stages)]
    of_layers = [billions(LayerSpan(range(layer, layer + 1), False, False)) for layer in range(count)]
    of_ends = [billions(LayerSpan(range(0), *end)) for end in ends]
    layers = explicit_layers(balance([of_layers] * stages, of_ends, [0] * count, [0] * stages), count)
    return [LayerSpan(own, *end) for own, end in zip(layers, ends, strict=True)]


def kept_bytes(model: ModelConfig, layers: range, element_bytes: int, tokens: int, rows: int, prompt_tokens: int) -> int:
    """Activations of a sample's mask rows in these layers that are kept for its backward pass; the ordinary rows keep nothing.

    With frozen matrices of width E, an MLP of width I and H heads of width D, in numbers of s bytes, a layer keeps
    R·(8·E + s·(3·I + 2·H·D + S) + 4·H) + 2·s·S·H·D: for each row what enters two norms, in float32, and the products of the MLP's
    gate, its queries, its outputs of attention and its mask; and keys and values of all slots, repeated for all heads.
    """
    slots, total = prompt_tokens + tokens + rows, 0
    for layer in layers:
        shape, experts = model.attention_layers[layer], model.experts[layer]
        inner, of_heads = (
            model.inner_size * (experts.top_k if experts else 1),
            shape.num_heads * (shape.key_dim + shape.value_dim),
        )
        of_row = 8 * model.hidden_size + element_bytes * (3 * inner + of_heads + slots) + 4 * shape.num_heads
        total += rows * of_row + element_bytes * slots * of_heads
    return total


def training_table(plan: Plan, tokens: int, rows: int, prompt_tokens: int) -> tuple[Group, list[int]]:
    """One line per rank of a training on the devices of a plan's stages, and below it the time of a step; and the ranks, in red,
    that lack memory. All ranks have all that is learned, and r of n ranks has n - r samples in flight. Raises UserError if there
    are fewer layers.
    """
    model, weights, count = model_by_name(plan.target), WeightFormat(plan.weights.dtype), len(plan.stages)
    costs, width = ModelCosts(model, weights, 1, 0, 1, formats=ALL_PLAIN), model.hidden_size * weights.element_bytes
    table = Table(
        title=f"Training BiTA: {plan.target} in {weights.dtype}, GB and ms of {count} ranks", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("server", "device") else "right")
    learned = _LEARNED_BYTES * prompt_tokens * costs.token_bytes(range(model.num_hidden_layers)) // weights.element_bytes
    libraries = CONTEXT_BYTES + LIBRARY_BYTES + CUBLAS_BYTES + NCCL_BYTES
    lacking, slowest_ms = [], 0.0
    for rank, (stage, span) in enumerate(zip(plan.stages, training_cut(model, count), strict=True)):
        place, layers, in_flight = stage.placement, span.layers, count - rank
        messages = width * (BATCHES_AT_ONCE * count * (tokens + 2 * rows) + in_flight * (tokens + rows))
        ends = model.vocab_size * (_LOGIT_BYTES * rows * span.last + 4 * model.hidden_size * (span.first or span.last))
        held = costs.weight_bytes(layers, span.first, span.last)
        kept = in_flight * kept_bytes(model, layers, weights.element_bytes, tokens, rows, prompt_tokens)
        other = libraries + messages + tokens * costs.token_bytes(layers) + ends  # also a Markov table's float32 embeddings
        total, usable = held + learned + kept + other, round(_USABLE * DEVICES[place.device].memory_bytes)
        forward, both = (costs.pass_time(DEVICES[place.device], layers, last) for last in (False, span.last))
        sent_ms = 0.0 if span.last else sum(stage.timing.link.transfer_ms(width * of) for of in (tokens + rows, rows))
        sample_ms = forward.ms(tokens) + 2 * both.ms(rows) + sent_ms
        lacking += [rank] if total > usable else []
        slowest_ms = max(slowest_ms, sample_ms)
        table.add_row(
            str(rank), place.host, f"{place.device} #{place.index}", f"{layers.start}-{layers.stop - 1}",
            *(f"{part / GIGA:.2f}" for part in (held, learned, kept, other)), f"{total / GIGA:.1f}", f"{usable / GIGA:.1f}",
            f"{sample_ms:.0f}", style="red" if total > usable else None,
        )  # fmt: skip
    steps = ", ".join(f"{samples}: {(samples + count - 1) * slowest_ms / 1000:.1f} s" for samples in _STEPS)
    sample = f"Samples of {tokens:,} tokens, {rows} mask rows and {prompt_tokens} tokens of the learned prompt."
    return Group(table, f"{sample}\nA step by their number: {steps}. Estimated; not run on GPUs yet."), lacking
