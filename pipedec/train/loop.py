"""The training loop: optimiser steps with a checkpoint and a log, from which a killed run continues to the same weights.

Owns checkpoint files, log, learning rate and progress bar. It does not know what a step learns from: the caller leaves the
gradients of a step in the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipedec.core import UserError
from pipedec.train.run import replacing
from pipedec.transport.replicas import ALONE, Replicas

COLUMNS = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()  # of a progress bar

Figures = dict[str, Any]  # what is logged of a step: numbers and lists of numbers, "loss" among them

# From the number of a step to its figures; adds the step's gradients to the model's parameters.
Backward = Callable[[int], Figures]


class TrainingLoop:
    """Runs steps and keeps ``{name}.safetensors`` and ``{name}.jsonl`` (one line per step) in ``work``.

    Args:
        model: its parameters are trained, in float32.
        identity: everything that decides the result; a checkpoint is resumed only if all of it is equal.
        max_norm: gradients are clipped to this norm; None = no clipping.
        replicas: the processes that take the same steps; the first one writes.

    Raises:
        UserError: ``work`` holds the checkpoint of another run.
    """

    SAVE_EVERY = 20  # steps

    def __init__(
        self, name: str, model: nn.Module, optimizers: list[torch.optim.Optimizer], work: Path, identity: dict[str, Any],
        max_norm: float | None = 1.0, replicas: Replicas = ALONE,
    ) -> None:  # fmt: skip
        self._name, self._model, self._optimizers = name, model, optimizers
        self._identity, self._max_norm, self._replicas = json.loads(json.dumps(identity)), max_norm, replicas
        self._checkpoint, self._log = work / f"{name}.safetensors", work / f"{name}.jsonl"
        work.mkdir(parents=True, exist_ok=True)

    def run(self, steps: int, rate: Callable[[int], float], backward: Backward) -> None:
        """Run the steps that the checkpoint does not hold yet; ``rate`` gives the learning rate of a step."""
        start = self._resume()
        self._replicas.wait()
        self._model.train()
        with Progress(*COLUMNS, disable=not self._replicas.is_first) as progress, self._log.open("a") as log:
            bar = progress.add_task(self._name, total=steps, completed=start)
            for step in range(start, steps):
                figures = {name: _rounded(value) for name, value in backward(step).items()}
                self._update(rate(step))
                if self._replicas.is_first:
                    log.write(json.dumps({"step": step + 1, **figures}) + "\n")
                    log.flush()
                progress.update(bar, advance=1, description=f"{self._name} {_described(figures)}")
                if self._replicas.is_first and ((step + 1) % self.SAVE_EVERY == 0 or step + 1 == steps):
                    self._save(step + 1)
        self._model.eval()

    def _update(self, rate: float) -> None:
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _save(self, step: int) -> None:
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self._model.named_parameters()}
        for number, optimizer in enumerate(self._optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{parameter}.{key}": torch.as_tensor(value) for key, value in state.items()}
        tensors = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
        with replacing(self._checkpoint) as unfinished:
            save_file(tensors, unfinished, metadata={"step": str(step), "identity": json.dumps(self._identity)})

    def _resume(self) -> int:
        """Load the checkpoint, if any, and drop log lines of later steps; returns the number of steps already done."""
        start = self._load() if self._checkpoint.exists() else 0
        if self._log.exists() and self._replicas.is_first:
            kept = self._log.read_text().splitlines(keepends=True)[:start]
            with replacing(self._log) as unfinished:
                unfinished.write_text("".join(kept))
        return start

    def _load(self) -> int:
        with safe_open(self._checkpoint, "pt") as stored:
            metadata = stored.metadata() or {}
        check_identity(self._checkpoint, json.loads(metadata.get("identity", "{}")), self._identity)
        tensors = load_file(self._checkpoint)
        if any(f"model.{name}" not in tensors for name, _ in self._model.named_parameters()):
            raise UserError(f"{self._checkpoint} was written by another version: give another --work, or remove it")
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        for number, optimizer in enumerate(self._optimizers):
            states: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    _, _, parameter_number, key = name.split(".", 3)
                    states.setdefault(int(parameter_number), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        return int(metadata["step"])


def muon_and_adamw(model: nn.Module, learning_rate: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
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


def _described(figures: Figures) -> str:
    texts = {name: value if isinstance(value, list) else [value] for name, value in figures.items()}
    return ", ".join(f"{name} {' '.join(f'{each:.3g}' for each in values)}" for name, values in texts.items())
