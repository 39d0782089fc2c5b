"""A training run: where it computes and writes, its loop, and its report: ``training.json``, a model card and tables.

The loop keeps a checkpoint and a log, from which a killed run continues to the same weights. It does not know what a step learns
from: the caller leaves the gradients of a step in the model. A card is a jinja2 template filled with the report. Each training
defines the fields of its report.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from jinja2 import Environment, StrictUndefined
from msgspec import Meta
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipedec.core.errors import UserError
from pipedec.engine.build import DTYPES
from pipedec.flags import Help
from pipedec.train.replicas import ALONE, Replicas

Row = dict[str, Any]
Cells = Callable[..., list[str]]  # the cells of a measured row
CARDS = Path(__file__).parent / "cards"  # the templates


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path for a file that takes the place of ``path`` when it is complete."""
    unfinished = path.with_suffix(".partial")
    yield unfinished
    unfinished.replace(path)


@dataclass(frozen=True)
class Run:
    """Where a training computes and writes."""

    out: Annotated[Path, Help("Directory for the trained model and its training.json.", "DIR")]
    work: Annotated[Path, Help("Directory for checkpoint, log and generated answers; a second run continues it.", "DIR")]
    dtype: str = "float32"  # what forward passes compute in; trained weights are float32
    threads: Annotated[int, Meta(ge=1), Help("CPU threads.")] = 2
    device: torch.device = torch.device("cpu")
    replicas: Replicas = ALONE  # the processes that train together

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def write_report(self, report: dict[str, Any], card: str) -> None:
        """Write the model card, and last ``training.json``: where that file is, the training is complete."""
        (self.out / "README.md").write_text(card, encoding="utf-8")
        with replacing(self.out / "training.json") as unfinished:
            unfinished.write_text(json.dumps(report, indent=2) + "\n")


def bita_cells(row: Row) -> list[str]:
    """Top 1, top 5 and loss of each mask; tokens per pass of chain and tree; groups."""
    shares = [" ".join(f"{share:.1%}" for share in row[key]) for key in ("top1", "top5")]
    loss = " ".join(f"{loss:.2f}" for loss in row["loss"])
    return [*shares, loss, f"{row['chain_tokens']:.2f}", f"{row['tree_tokens']:.2f}", f"{row['groups']:,}"]


def top_k_cells(row: Row) -> list[str]:
    """Top 1, top 4 and top 16."""
    return [f"{row[key]:.1%}" for key in ("top1", "top4", "top16")]


def change_cells(before: Row, after: Row) -> list[str]:
    """Top 1, top 4 and top 16, before → after; tokens."""
    changes = zip(top_k_cells(before), top_k_cells(after), strict=True)
    return [*(f"{old} → {new}" for old, new in changes), f"{after['tokens']:,}"]


CELLS: dict[str, Cells] = {"bita_cells": bita_cells, "top_k_cells": top_k_cells, "change_cells": change_cells}


def card(template: Path, report: dict[str, Any], cells: dict[str, Cells] = CELLS) -> str:
    """Markdown for ``README.md`` beside the weights; the template may call ``cells``."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["fmt"] = format  # {{ steps | fmt(",") }}
    environment.filters["line"] = lambda cells, *first: f"| {' | '.join([*first, *cells])} |"
    environment.filters["shares"] = lambda shares: ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    environment.filters["counts"] = lambda counts, *without: ", ".join(
        f"{count:,} {name}" for name, count in counts.items() if name not in without
    )
    environment.filters["phases"] = lambda phases: ", ".join(f"{layers} layers for {steps:,} steps" for layers, steps in phases)
    environment.globals.update(cells)
    return environment.from_string(template.read_text(encoding="utf-8")).render(report)


def print_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table whose first column is left-aligned, the others right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


COLUMNS = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()  # progress bar

Figures = dict[str, Any]  # what is logged of a step: numbers and lists of numbers, "loss" among them

# From the number of a step to its figures; adds the step's gradients to the model's parameters.
Backward = Callable[[int], Figures]


class TrainingLoop:
    """Runs steps and keeps ``{name}.safetensors`` and ``{name}.jsonl`` (one line per step) in ``work``; with a score also
    ``{name}-best.safetensors``.

    Args:
        model: its parameters are trained, in float32.
        identity: everything that decides the result; a checkpoint is resumed only if all of it is equal.
        max_norm: gradients are clipped to this norm; None = no clipping.
        replicas: the processes that take the same steps; the first one writes.

    Raises UserError if ``work`` holds the checkpoint of another run.
    """

    SAVE_EVERY = 20  # steps
    SAVE_SECONDS = 240.0  # after which slow steps are saved earlier
    SCORE_EVERY = 100

    def __init__(
        self, name: str, model: nn.Module, optimizers: list[torch.optim.Optimizer], work: Path, identity: dict[str, Any],
        max_norm: float | None = 1.0, replicas: Replicas = ALONE,
    ) -> None:  # fmt: skip
        self._name, self._model, self._optimizers = name, model, optimizers
        self._identity, self._max_norm, self._replicas = json.loads(json.dumps(identity)), max_norm, replicas
        self._checkpoint, self._log = work / f"{name}.safetensors", work / f"{name}.jsonl"
        self._best = work / f"{name}-best.safetensors"
        work.mkdir(parents=True, exist_ok=True)

    def run(self, steps: int, rate: Callable[[int], float], backward: Backward, score: Callable[[], float] | None = None) -> None:
        """Run the steps that the checkpoint does not hold yet; ``rate`` gives the learning rate of a step.

        The first process's model ends with the weights of the highest ``score``, which is computed every 100 steps and after the
        last one. Without it, it ends with the last ones.
        """
        start = self._load() if self._checkpoint.exists() else 0
        if self._log.exists() and self._replicas.is_first:  # drop lines of later steps
            kept = self._log.read_text().splitlines(keepends=True)[:start]
            with replacing(self._log) as unfinished:
                unfinished.write_text("".join(kept))
        self._replicas.wait()
        self._model.train()
        saved = time.monotonic()
        with Progress(*COLUMNS, disable=not self._replicas.is_first) as progress, self._log.open("a") as log:
            bar = progress.add_task(self._name, total=steps, completed=start)
            for step in range(start, steps):
                figures = {name: _rounded(value) for name, value in backward(step).items()}
                if self._max_norm is not None:
                    nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
                learning_rate = rate(step)
                for optimizer in self._optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                is_scored = score is not None and ((step + 1) % self.SCORE_EVERY == 0 or step + 1 == steps)
                if self._replicas.is_first:
                    if is_scored and score is not None:
                        figures["score"] = _rounded(score())
                        self._keep_best(figures["score"])
                    log.write(json.dumps({"step": step + 1, **figures}) + "\n")
                    log.flush()
                lists = {name: value if isinstance(value, list) else [value] for name, value in figures.items()}
                shown = ", ".join(f"{name} {' '.join(f'{each:.3g}' for each in values)}" for name, values in lists.items())
                progress.update(bar, advance=1, description=f"{self._name} {shown}")
                is_due = (step + 1) % self.SAVE_EVERY == 0 or time.monotonic() - saved > self.SAVE_SECONDS
                if self._replicas.is_first and (is_due or step + 1 == steps):
                    self._save(step + 1)
                    saved = time.monotonic()
        if score is not None and self._replicas.is_first:
            self._load_weights(load_file(self._best))
        self._model.eval()

    def _keep_best(self, score: float) -> None:
        """Keep the weights unless others that this run has kept have a higher score."""
        known = -math.inf
        if self._best.exists():
            with safe_open(self._best, "pt") as stored:
                metadata = stored.metadata() or {}
            if json.loads(metadata.get("identity", "{}")) == self._identity:
                known = float(metadata["score"])
        if score > known:
            metadata = {"score": str(score), "identity": json.dumps(self._identity)}
            with replacing(self._best) as unfinished:
                save_file(self._weights(), unfinished, metadata=metadata)

    def _weights(self) -> dict[str, Tensor]:
        parameters = self._model.named_parameters()
        return {f"model.{name}": parameter.detach().cpu().clone().contiguous() for name, parameter in parameters}

    def _load_weights(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])

    def _save(self, step: int) -> None:
        tensors = self._weights()
        for number, optimizer in enumerate(self._optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                kept = {f"optimizer.{number}.{parameter}.{key}": torch.as_tensor(value) for key, value in state.items()}
                tensors |= {name: tensor.cpu().clone().contiguous() for name, tensor in kept.items()}
        with replacing(self._checkpoint) as unfinished:
            save_file(tensors, unfinished, metadata={"step": str(step), "identity": json.dumps(self._identity)})

    def _load(self) -> int:
        """Load the checkpoint; returns the number of steps already done."""
        with safe_open(self._checkpoint, "pt") as stored:
            metadata = stored.metadata() or {}
        check_identity(self._checkpoint, json.loads(metadata.get("identity", "{}")), self._identity)
        tensors = load_file(self._checkpoint)
        if any(f"model.{name}" not in tensors for name, _ in self._model.named_parameters()):
            raise UserError(f"{self._checkpoint} was written by another version: give another --work, or remove it")
        self._load_weights(tensors)
        for number, optimizer in enumerate(self._optimizers):
            states: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    _, _, parameter_number, key = name.split(".", 3)
                    states.setdefault(int(parameter_number), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        return int(metadata["step"])


class Muon(torch.optim.Muon):
    """Muon that also takes stacks of matrices [N, out, in], such as a layer's experts: each of them is updated by itself."""

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        self._stacks = {stack: [nn.Parameter(matrix) for matrix in stack.data] for stack in parameters if stack.ndim == 3}
        super().__init__([matrix for one in parameters for matrix in self._stacks.get(one, [one])], **options)

    def step(self, closure: Any = None) -> Any:
        for stack, matrices in self._stacks.items():
            for number, matrix in enumerate(matrices):
                matrix.grad = None if stack.grad is None else stack.grad[number]
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for stack in self._stacks:
            stack.grad = None


def muon_and_adamw(model: nn.Module, learning_rate: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, those of experts included; AdamW for embeddings, norms and the rest."""
    named = dict(model.named_parameters())
    matrices = {
        name: p for name, p in named.items() if ".layers." in name and (p.ndim == 2 or (p.ndim == 3 and ".experts." in name))
    }
    others = [parameter for name, parameter in named.items() if name not in matrices]
    return [
        Muon(list(matrices.values()), lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def warm_up(step: int, warmup_steps: int) -> float:
    """Factor of the learning rate: rises linearly to 1 over the first steps."""
    return min(1.0, (step + 1) / warmup_steps)


def linear_decay(step: int, steps: int) -> float:
    """Factor of the learning rate: falls linearly from 1 to a twentieth."""
    return 1 - 0.95 * step / steps


def cosine_decay(step: int, steps: int) -> float:
    """Factor of the learning rate: falls from 1 to 0 along a cosine."""
    return (1 + math.cos(math.pi * step / steps)) / 2


def epoch_batch(step: int, num_samples: int, batch: int, seed: int) -> list[int]:
    """Numbers of the samples of a step. Every epoch is shuffled anew; a batch may reach into the next epoch."""
    numbers = range(step * batch, (step + 1) * batch)
    epochs = {number // num_samples for number in numbers}
    orders = {
        epoch: torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)) for epoch in epochs
    }
    return [int(orders[number // num_samples][number % num_samples]) for number in numbers]


def check_identity(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare the identity of the run that wrote ``path`` with this run's. Raises UserError if they differ."""
    differing = [key for key in wanted if found.get(key) != wanted[key]]
    if differing:
        listed = ", ".join(f"{key} {found.get(key)}" for key in differing)
        raise UserError(f"{path} belongs to another run ({listed}): give another --work, or remove it")


def _rounded(value: Any) -> Any:
    return [_rounded(each) for each in value] if isinstance(value, list) else round(value, 5)
