"""One model's way through its phases: optimisers, learning rate, losses, and a checkpoint from which a killed run continues.

Owns the loop. It does not know where rows come from, nor what is done with the model afterwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

# From a model and some rows to the mean loss of their tokens.
Loss = Callable[[Callable[..., Any], Tensor], Tensor]


class Rate(Protocol):
    """What optimisers have to know of a recipe."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


class Schedule(Rate, Protocol):
    """What a trainer has to know of a recipe."""

    @property
    def batch(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...


def deepen(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Double the depth without changing the function: every layer is followed by a silenced copy of itself."""
    old = model.config.num_hidden_layers
    if layers != 2 * old:
        raise ValueError(f"a phase must double the layers: {old} → {layers}")
    config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": layers})
    deeper = LlamaForCausalLM(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".layers." not in name}
    for index in range(layers):
        for name, tensor in model.model.layers[index // 2].state_dict().items():
            silent = index % 2 == 1 and ("o_proj" in name or "down_proj" in name)
            state[f"model.layers.{index}.{name}"] = torch.zeros_like(tensor) if silent else tensor
    deeper.load_state_dict(state)
    return deeper


def make_optimizers(model: nn.Module, recipe: Rate) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    rate = recipe.learning_rate
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, steps: int, last_phase: bool, warmup: int) -> float:
    """Warm up, hold; in the last phase fall linearly to a twentieth."""
    factor = min(1.0, (step + 1) / warmup)
    return factor * (1.0 - 0.95 * step / steps) if last_phase else factor


def next_token_loss(model: Callable[..., Any], ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of every next token."""
    logits = model(input_ids=ids_BT).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())


def distillation_loss(model: Callable[..., Any], ids_BT: Tensor, teacher: Callable[..., Any]) -> Tensor:
    """KL divergence from the target's distribution to the draft's, per token."""
    with torch.no_grad():
        wanted = teacher(input_ids=ids_BT).logits.float().log_softmax(-1).flatten(0, 1)
    given = model(input_ids=ids_BT).logits.float().log_softmax(-1).flatten(0, 1)
    return nn.functional.kl_div(given, wanted, log_target=True, reduction="batchmean")


class Trainer:
    """Runs the phases of one model and keeps a resumable checkpoint in ``work``."""

    SAVE_EVERY = 50  # steps

    def __init__(self, name: str, recipe: Schedule, work: Path, device: str, compiled: bool) -> None:
        self.name, self.recipe, self.work, self.device, self.compiled = name, recipe, work, device, compiled

    def run(self, model: LlamaForCausalLM, phases: tuple[tuple[int, int], ...], rows: Tensor, loss_of: Loss) -> LlamaForCausalLM:
        """Train through ``phases`` and return the last model. Each phase continues in the rows where the last stopped."""
        first_row = 0
        for index, (layers, steps) in enumerate(phases):
            if model.config.num_hidden_layers != layers:
                model = deepen(model, layers)
            model = model.to(self.device)
            used = steps * self.recipe.batch
            phase_rows = rows[torch.arange(first_row, first_row + used) % len(rows)]
            self._phase(model, index, steps, index == len(phases) - 1, phase_rows, loss_of)
            first_row += used
        return model

    def _phase(self, model: LlamaForCausalLM, index: int, steps: int, last: bool, rows: Tensor, loss_of: Loss) -> None:
        recipe = self.recipe
        optimizers = make_optimizers(model, recipe)
        start = self._resume(model, optimizers, index)
        if start >= steps:
            return
        compute_loss = torch.compile(loss_of) if self.compiled else loss_of
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as progress:
            bar = progress.add_task(f"{self.name} phase {index}", total=steps, completed=start)
            for step in range(start, steps):
                factor = learning_rate_factor(step, steps, last, recipe.warmup_steps)
                ids = rows[step * recipe.batch : (step + 1) * recipe.batch].to(self.device)
                with torch.autocast(self.device, dtype=torch.bfloat16):
                    loss = compute_loss(model, ids)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = recipe.learning_rate * factor
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                progress.update(bar, advance=1, description=f"{self.name} phase {index} loss {loss.item():.3f}")
                if (step + 1) % self.SAVE_EVERY == 0 or step + 1 == steps:
                    self._log(index, step + 1, loss.item())
                    self._save(model, optimizers, index, step + 1)

    def _checkpoint(self, index: int) -> Path:
        return self.work / f"{self.name}-phase{index}.safetensors"

    def _save(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], index: int, step: int) -> None:
        tensors = {f"model.{name}": p.detach().cpu() for name, p in model.named_parameters()}
        for number, optimizer in enumerate(optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"optimizer.{number}.{parameter}.{key}"] = torch.as_tensor(value).cpu().contiguous()
        partial = self._checkpoint(index).with_suffix(".partial")
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial, metadata={"step": str(step)})
        partial.rename(self._checkpoint(index))

    def _resume(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], index: int) -> int:
        """Load the phase's checkpoint if there is one; returns the steps already done."""
        path = self._checkpoint(index)
        if not path.exists():
            return 0
        tensors = load_file(path)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        for number, optimizer in enumerate(optimizers):
            states: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    _, _, parameter_index, key = name.split(".", 3)
                    states.setdefault(int(parameter_index), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        with safe_open(path, "pt") as stored:
            return int(stored.metadata()["step"])

    def _log(self, phase: int, step: int, loss: float) -> None:
        row = {"model": self.name, "phase": phase, "step": step, "loss": round(loss, 4), "time": round(time.time(), 1)}
        with (self.work / "log.jsonl").open("a") as stream:
            stream.write(json.dumps(row) + "\n")
