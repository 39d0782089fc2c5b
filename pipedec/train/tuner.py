"""Steps on one model with a checkpoint and a log, from which a killed run continues to the same weights.

Owns optimisers, learning rate, files and progress. What a step learns from is the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipedec.core import UserError
from pipedec.train.trainer import Rate, make_optimizers

# From the number of a step to what is logged of it; it leaves gradients in the model.
Backward = Callable[[int], dict[str, float]]


class Schedule(Rate, Protocol):
    """What a tuner has to know of a recipe."""

    @property
    def steps(self) -> int: ...

    def rate(self, step: int) -> float:
        """The learning rate of a step."""


class Tuner:
    """Runs the steps of a recipe and keeps ``{name}.safetensors`` and ``{name}.jsonl``, one line a step, in ``work``.

    Args:
        model: what learns, in float32.
        identity: what makes this run another than others: a checkpoint is taken only if all of it is the same.

    Raises:
        UserError: ``work`` holds the checkpoint of another run.
    """

    SAVE_EVERY = 20  # steps

    def __init__(self, name: str, model: Any, recipe: Schedule, work: Path, identity: dict[str, Any]) -> None:
        self._name, self._model, self._recipe, self._identity = name, model, recipe, identity
        self._optimizers = make_optimizers(model, recipe)
        self._checkpoint, self._log = work / f"{name}.safetensors", work / f"{name}.jsonl"
        work.mkdir(parents=True, exist_ok=True)

    def run(self, backward: Backward) -> None:
        """All steps that are still to do."""
        start = self._resume()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._model.train()
        with Progress(*columns) as progress, self._log.open("a") as log:
            bar = progress.add_task(self._name, total=self._recipe.steps, completed=start)
            for step in range(start, self._recipe.steps):
                figures = backward(step)
                self._update(self._recipe.rate(step))
                log.write(json.dumps({"step": step + 1, **{name: round(value, 5) for name, value in figures.items()}}) + "\n")
                log.flush()
                progress.update(bar, advance=1, description=f"{self._name} loss {figures['loss']:.3f}")
                if (step + 1) % self.SAVE_EVERY == 0 or step + 1 == self._recipe.steps:
                    self._save(step + 1)
        self._model.eval()

    def _update(self, rate: float) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
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
        partial = self._checkpoint.with_suffix(".partial")
        metadata = {"step": str(step), "identity": json.dumps(self._identity)}
        save_file({name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)
        partial.rename(self._checkpoint)

    def _resume(self) -> int:
        """Load the checkpoint if there is one and forget what was logged after it; returns the steps already done."""
        start = self._load() if self._checkpoint.exists() else 0
        if self._log.exists():
            kept = self._log.read_text().splitlines(keepends=True)[:start]
            self._log.with_suffix(".partial").write_text("".join(kept))
            self._log.with_suffix(".partial").rename(self._log)
        return start

    def _load(self) -> int:
        with safe_open(self._checkpoint, "pt") as stored:
            metadata = stored.metadata()
        check_identity(self._checkpoint, json.loads(metadata["identity"]), self._identity)
        tensors = load_file(self._checkpoint)
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


def check_identity(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises UserError if what ``path`` holds was made by another run than the one wanted."""
    differing = [key for key in wanted if found.get(key) != wanted[key]]
    if differing:
        listed = ", ".join(f"{key} {found.get(key)}" for key in differing)
        raise UserError(f"{path} belongs to another run ({listed}): give another --work, or remove it")
