"""``python -m benchmarks.mixtures``: what rows of a mixture of experts have in common, and what a layer's experts cost.

``overlap``: how many experts rows have in common, by how they are related. The fewer distinct experts the rows of a forward
have, the fewer matrices it reads. Rows are of a path (consecutive tokens of one answer), siblings (the target's most likely
tokens after one context), or strangers (tokens of different answers). The target runs through transformers, in float32, so any
of its mixtures whose experts are stacks of matrices will do.
``products``: the experts of a layer with random weights, beside nothing but the products of their matrices, in turns.

Shapes: L layers with experts, E experts of a layer, K experts of a row, T tokens of a text, R rows.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.output import Device, Out, append, console, machine_text, titled_table
from pipedec.bench.options import Counts, Positive, draw
from pipedec.bench.record import Row, check_writable, header
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.data import PromptSource
from pipedec.engine.devices import chosen_device
from pipedec.families import model_config
from pipedec.families.skeleton import has_experts
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.messages.request import PromptRequest
from pipedec.model.experts import ExpertMatrices, Experts
from pipedec.model.matrices import DenseMatrix, Products
from pipedec.plan.roofline import ExpertReads
from pipedec.text.prompt import Prompter
from pipedec.verify.reference import load_transformers

KINDS = ("path", "siblings", "strangers")
_PLACES = 8  # in each answer: contexts that siblings follow, and starts of a path
_STEPS = 1000  # of the overlap, from -1 to 1


@dataclass(frozen=True)
class OverlapConfig:
    """The rows and answers to measure. Raises UserError for a number below 1."""

    rows: Annotated[Counts, Help("Numbers of rows.")] = (1, 2, 4, 8, 16, 32, 64)
    samples: Annotated[Positive, Help("Number of prompts chosen from each set; strangers need as many as there are rows.")] = 64
    max_tokens: Annotated[Positive, Help("Maximum number of tokens of an answer.")] = 96
    seed: Annotated[int, Help("Seed for choosing prompts and places.")] = 0
    device: Device = "auto"
    threads: Annotated[Positive, Help("Number of CPU threads.")] = 1

    def __post_init__(self) -> None:
        check_fields(self)


class Routing:
    """The experts of each row of a target's forwards, by layer."""

    def __init__(self, target: Any) -> None:
        """Raises UserError if no module of the target has a stack of experts, or they have different numbers of experts."""
        self._modules = [module for module in target.modules() if has_experts(module)]
        if not self._modules:
            raise UserError("the target has no experts: give a mixture")
        numbers = {len(module.down_proj) for module in self._modules}
        if len(numbers) > 1:
            raise UserError(f"the target's layers have different numbers of experts: {', '.join(map(str, sorted(numbers)))}")
        (self.num_experts,) = numbers

    @contextmanager
    def seen(self) -> Iterator[list[Tensor]]:
        """A list of the experts of each layer's rows, int64 [rows, K], which one forward in the context fills."""
        found: list[Tensor] = []

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            found.append(arguments[1].cpu())

        hooks = [module.register_forward_pre_hook(note) for module in self._modules]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()


class Rows:
    """Sets of rows by kind, from answers of a target: what their experts are."""

    def __init__(self, target: Any, prompts: Sequence[Sequence[int]], config: OverlapConfig) -> None:
        self._target, self._config, self._random = target, config, random.Random(config.seed)
        self.routing = Routing(target)
        self._texts: list[Tensor] = []  # int64 [1, T], prompt and answer
        self.answered: list[Tensor] = []  # int64 [L, answer's tokens, K]
        for prompt in prompts:
            text_1T = self._answer(prompt)
            with self.routing.seen() as found:
                target(input_ids=text_1T, use_cache=False)
            self._texts.append(text_1T)
            self.answered.append(torch.stack(found)[:, len(prompt) :])

    def of_kind(self, kind: str) -> Iterator[Tensor]:
        """The experts of as many related rows as there are, up to the largest number: int64 [L, R, K]. The first R of them are a
        set of R rows.
        """
        if kind == "strangers":
            for _ in range(_PLACES * len(self.answered)):
                texts = self._random.sample(self.answered, len(self.answered))
                chosen = [text_LTK[:, self._random.randrange(text_LTK.shape[1])] for text_LTK in texts[: max(self._config.rows)]]
                yield torch.stack(chosen, 1)
            return
        for text_1T, answer_LTK in zip(self._texts, self.answered, strict=True):
            length = answer_LTK.shape[1]
            for place in self._random.sample(range(length), min(_PLACES, length)):
                yield answer_LTK[:, place:] if kind == "path" else self._siblings(text_1T[:, : text_1T.shape[1] - length + place])

    def _answer(self, prompt: Sequence[int]) -> Tensor:
        ids_1T = torch.tensor([list(prompt)], device=self._target.device)
        answer: Tensor = self._target.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=self._config.max_tokens, do_sample=False,
            use_cache=True, pad_token_id=0,
        )  # fmt: skip
        return answer

    def _siblings(self, context_1T: Tensor) -> Tensor:
        """[L, R, K], the most likely token first."""
        output = self._target(input_ids=context_1T, use_cache=True)
        tokens_R = output.logits[0, -1].topk(max(self._config.rows)).indices
        cache = output.past_key_values
        cache.batch_repeat_interleave(len(tokens_R))
        with self.routing.seen() as found:
            self._target(input_ids=tokens_R[:, None], past_key_values=cache, use_cache=True)
        return torch.stack(found)


def distinct_experts(experts_LRK: Tensor) -> float:
    """The distinct experts of some rows, in the mean over layers."""
    return sum(len(layer.unique()) for layer in experts_LRK) / len(experts_LRK)


def fitted_overlap(distinct: dict[int, float], num_experts: int, top_k: int) -> float:
    """The overlap, from -1 to 1 in steps of 0.001, with the least squared error of distinct experts over numbers of rows."""

    def error(overlap: float) -> float:
        reads = ExpertReads(0.0, 0.0, num_experts, top_k, overlap)
        return sum((reads.distinct(rows) - found) ** 2 for rows, found in distinct.items())

    return min((step / _STEPS for step in range(-_STEPS, _STEPS + 1)), key=error)


@torch.no_grad()
def measure_overlap(target: Any, prompts: Sequence[Sequence[int]], config: OverlapConfig) -> list[Row]:
    """A row for each kind of related rows: distinct experts by number of rows, beside independent routing, and the overlap.

    Numbers of rows that no set has (an answer is too short, or there are too few strangers) are left out.
    """
    rows = Rows(target, prompts, config)
    num_experts, top_k = rows.routing.num_experts, rows.answered[0].shape[-1]
    everything_LTK = torch.cat(rows.answered, 1)
    counts_LE = torch.stack([layer.flatten().bincount(minlength=num_experts) for layer in everything_LTK])
    shares_LE = counts_LE / everything_LTK[0].numel()
    independent, measured = ExpertReads(0.0, 0.0, num_experts, top_k, overlap=0.0), []
    for kind in KINDS:
        found: dict[int, list[float]] = {}
        for experts_LRK in rows.of_kind(kind):
            for count in config.rows:
                if count <= experts_LRK.shape[1]:
                    found.setdefault(count, []).append(distinct_experts(experts_LRK[:, :count]))
        distinct = {count: sum(values) / len(values) for count, values in found.items()}
        measured.append(
            {
                "kind": kind, "num_experts": num_experts, "top_k": top_k, "distinct": distinct,
                "independent": {count: independent.distinct(count) for count in distinct},
                "overlap": fitted_overlap(distinct, num_experts, top_k),
                "sets": {count: len(values) for count, values in found.items()},
                "shares": {"least": shares_LE.min().item(), "most": shares_LE.max().item()},
            }
        )  # fmt: skip
    return measured


@dataclass(frozen=True)
class ProductsConfig:
    """The sizes and the steps. Raises UserError for a number below 1, or for more experts of a row than there are."""

    hidden_size: Annotated[Positive, Help("Numbers of an activation.")] = 1024
    inner_size: Annotated[Positive, Help("Numbers between the matrices of an expert.")] = 512
    experts: Annotated[Positive, Help("Experts of the layer.")] = 32
    top_k: Annotated[Positive, Help("Experts of a row, drawn at random.")] = 4
    rows: Annotated[Counts, Help("Rows of a step.")] = (1, 16)
    repeats: Annotated[Positive, Help("Steps of either, of which the median is reported.")] = 31
    threads: Annotated[Positive, Help("Number of CPU threads.")] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.top_k > self.experts:
            raise UserError(f"a row cannot have {self.top_k} of {self.experts} experts")


class _Layer:
    """The experts of a layer, in float32, with products as in a pipeline on a processor."""

    def __init__(self, config: ProductsConfig) -> None:
        self._config, self._products = config, Products()
        self._products.pad_rows = True
        sizes = {
            "gate_up_proj": (2 * config.inner_size, config.hidden_size),
            "down_proj": (config.hidden_size, config.inner_size),
        }
        self._matrices = {
            name: [DenseMatrix(torch.randn(size)).prepared() for _ in range(config.experts)] for name, size in sizes.items()
        }
        self._experts = Experts(self._products, {name: ExpertMatrices(found) for name, found in self._matrices.items()})
        self._module = SimpleNamespace(has_gate=True, has_bias=False, has_post_expert_norm=False, _apply_gate=self._gated)

    def times_ms(self, rows: int) -> tuple[float, float]:
        """Milliseconds of one step, and of its products alone."""
        config = self._config
        hidden_RE, weights_RK = torch.randn(rows, config.hidden_size), torch.rand(rows, config.top_k)
        ids_RK = torch.stack([torch.randperm(config.experts)[: config.top_k] for _ in range(rows)])
        counts = ids_RK.flatten().bincount(minlength=config.experts).tolist()
        parts = [
            (name, expert, torch.randn(count, found[expert].shape[1]))
            for name, found in self._matrices.items()
            for expert, count in enumerate(counts)
            if count
        ]
        began = time.perf_counter()
        self._experts(self._module, hidden_RE, ids_RK, weights_RK)
        ended = time.perf_counter()
        for name, expert, rows_of_expert in parts:
            self._products(rows_of_expert, self._matrices[name][expert])
        return 1000 * (ended - began), 1000 * (time.perf_counter() - ended)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up


@torch.inference_mode()
def measure_products(config: ProductsConfig) -> list[Row]:
    """A row for each number of rows: milliseconds of a layer's experts and of their products, and the median of ratios."""
    torch.set_num_threads(config.threads)
    layer, measured = _Layer(config), []
    for rows in config.rows:
        times = [layer.times_ms(rows) for _ in range(config.repeats + 1)][1:]
        experts_ms, products_ms = (statistics.median(values) for values in zip(*times, strict=True))
        ratio = statistics.median(experts / products for experts, products in times)
        measured.append({"rows": rows, "experts_ms": experts_ms, "products_ms": products_ms, "ratio": ratio})
    return measured


@click.group()
def mixtures() -> None:
    """Measure mixtures of experts."""


@mixtures.command()
@options_of(OverlapConfig, "config")
@own_options
def overlap(
    config: OverlapConfig,
    target: Annotated[Path, Help("Checkpoint directory of a mixture.", "DIR")],
    prompts: Annotated[tuple[str, ...], Help("Prompts to answer; may be repeated.", "[NAME=]FILE[#KEY=VALUE]", repeated=True)],
    out: Out = None,
) -> None:
    """Count the distinct experts of rows of one path, of siblings and of strangers."""
    check_writable(out)
    torch.set_num_threads(config.threads)
    prompter = Prompter(target, model_config(target).context_length)
    asked = PromptRequest("", sampling=SamplingParams(max_tokens=config.max_tokens))
    sets = [PromptSource.parse(text).read() for text in prompts]
    drawn = draw(prompter, sets, asked, config.samples, config.seed)
    model = load_transformers(target, torch.float32, chosen_device(config.device))
    with console.status("measuring"):
        measured = measure_overlap(model, [one.token_ids for one in drawn], config)
    common = header(
        "mixtures-overlap", {**asdict(config), "device": model.device.type, "target": target.name, "prompts": len(drawn)}
    )
    rows = [{**common, **row} for row in measured]
    Console().print(_table(rows))
    append(out, rows)


@mixtures.command()
@options_of(ProductsConfig, "config")
@own_options
def products(config: ProductsConfig, out: Out = None) -> None:
    """Time the experts of a layer beside the products of their matrices alone."""
    check_writable(out)
    common = header("mixtures-products", {**asdict(config), "device": "cpu"})
    with console.status("measuring"):
        rows = [{**common, **row} for row in measure_products(config)]
    caption = (
        f"{config.experts} experts, {config.top_k} of a row, of {config.hidden_size} and {config.inner_size} numbers, float32. "
        f"Medians of {config.repeats} steps. {machine_text(common)}."
    )
    table = titled_table("The experts of a layer", ("rows", "experts, ms", "their products, ms", "ratio"), caption)
    for row in rows:
        table.add_row(str(row["rows"]), f"{row['experts_ms']:.2f}", f"{row['products_ms']:.2f}", f"{row['ratio']:.2f}")
    Console().print(table)
    append(out, rows)


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    caption = (
        f"{first['config']['target']}: {first['num_experts']} experts, {first['top_k']} of a row; answers to "
        f"{first['config']['prompts']} prompts. Independent: of as many rows under uniform routing. Overlap: fitted over all "
        f"numbers of rows. Of the rows of a layer, an expert has {first['shares']['least']:.1%} to "
        f"{first['shares']['most']:.1%}; equal shares are {1 / first['num_experts']:.1%}. {machine_text(first)}."
    )
    counts = max((list(row["distinct"]) for row in rows), key=len)
    table = titled_table("Distinct experts of a layer", ("rows of", *map(str, counts), "overlap"), caption)
    for row in rows:
        table.add_row(row["kind"], *_cells(row["distinct"], counts), f"{row['overlap']:.2f}")
    table.add_row("independent", *_cells(max((row["independent"] for row in rows), key=len), counts), "0")
    return table


def _cells(distinct: dict[int, float], counts: list[int]) -> list[str]:
    return [f"{distinct[count]:.1f}" if count in distinct else "" for count in counts]


if __name__ == "__main__":
    run_command(mixtures)
