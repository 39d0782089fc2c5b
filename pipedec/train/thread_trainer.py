"""Fine-tune a model on rows whose mask and positions are those of threads, from a checkpoint on if there is one.

Owns the recipe, which samples a step has, the loss, and the checkpoint. It does not know how answers become rows, nor what is
done with the model afterwards.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipedec.core import UserError
from pipedec.threads.visibility import IGNORED
from pipedec.train.thread_samples import FORMS, Row, Sample, Writer
from pipedec.train.trainer import make_optimizers

_TOKENS_AT_ONCE = 2048  # of one forward, with their padding


@dataclass(frozen=True)
class ThreadRecipe:
    """Everything that decides the result; a step is as many samples as have ``batch_tokens`` tokens together.

    Attributes:
        form: ``tree`` or ``unrolled``.
        plain_share: of the samples drawn, how many are answered in one thread, without marker.
        control_weight: what a target counts that is a control token of its dialect; others count 1.
        max_length: longer samples are left out.
    """

    steps: int = 400
    batch_tokens: int = 4096
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.01
    control_weight: float = 2.0
    plain_share: float = 0.15
    max_length: int = 512
    form: str = "tree"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise UserError("--learning-rate must be above 0")
        if not 0 <= self.plain_share <= 1:
            raise UserError("--plain-share must be between 0 and 1")
        if self.form not in FORMS:
            raise UserError(f"--form {self.form}: choose one of {', '.join(FORMS)}")

    def rate(self, step: int) -> float:
        """The learning rate of a step: warm up, then fall linearly to a twentieth."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * (1 - 0.95 * step / self.steps)


@dataclass(frozen=True)
class Batch:
    """Rows side by side, padded to N tokens: padding sees itself alone and learns nothing.

    Attributes:
        token_ids, positions, targets: int64 [B, N].
        mask: bool [B, 1, N, N].
    """

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor

    @classmethod
    def of(cls, rows: list[Row], device: torch.device) -> Batch:
        longest = max(len(row.token_ids) for row in rows)
        token_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        positions, targets = torch.zeros_like(token_ids), torch.full_like(token_ids, IGNORED)
        mask = torch.eye(longest, dtype=torch.bool).repeat(len(rows), 1, 1, 1)
        for number, row in enumerate(rows):
            length = len(row.token_ids)
            token_ids[number, :length], positions[number, :length] = row.token_ids, row.positions
            targets[number, :length] = row.targets
            mask[number, 0, :length, :length] = row.mask
        return cls(token_ids.to(device), positions.to(device), targets.to(device), mask.to(device))


def learned_logits(model: Callable[..., Any], batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of the tokens that learn something, and what they learn: [L, V] and [L]."""
    logits = model(
        input_ids=batch.token_ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
    ).logits  # fmt: skip
    learns = batch.targets != IGNORED
    return logits[learns].float(), batch.targets[learns]


def batches(rows: list[Row], device: torch.device) -> Iterator[Batch]:
    """The rows in forwards of few tokens, rows of like length together."""
    piece: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.token_ids)):
        if piece and (len(piece) + 1) * len(row.token_ids) > _TOKENS_AT_ONCE:
            yield Batch.of(piece, device)
            piece = []
        piece.append(row)
    if piece:
        yield Batch.of(piece, device)


def digest(samples: list[Sample]) -> str:
    """A name for the samples to learn from."""
    total = hashlib.sha256()
    for sample in samples:
        total.update(f"{sample.dialect} {sample.prompt} {sample.answer}".encode())
    return total.hexdigest()[:16]


def plan(samples: list[Sample], writer: Writer, recipe: ThreadRecipe) -> list[list[Sample]]:
    """The samples of every step: each once before any comes again, some of them answered in one thread instead.

    Raises:
        UserError: no sample is short enough.
    """
    if not any(sample.num_tokens <= recipe.max_length for sample in samples):
        raise UserError(f"nothing to learn from: no answer with its prompt has at most {recipe.max_length} tokens")
    steps: list[list[Sample]] = []
    chosen: list[Sample] = []
    drawn = _drawn(samples, writer, recipe)
    while len(steps) < recipe.steps:
        chosen.append(next(drawn))
        if sum(sample.num_tokens for sample in chosen) >= recipe.batch_tokens:
            steps.append(chosen)
            chosen = []
    return steps


def _drawn(samples: list[Sample], writer: Writer, recipe: ThreadRecipe) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        order = torch.randperm(len(samples), generator=generator).tolist()
        is_plain = (torch.rand(len(samples), generator=generator) < recipe.plain_share).tolist()
        for number, plain in zip(order, is_plain, strict=True):
            if samples[number].num_tokens <= recipe.max_length:
                yield writer.sample(samples[number].record, None) if plain else samples[number]


class ThreadTrainer:
    """Runs the steps of a recipe and keeps checkpoint and log in ``work``, from which a killed run continues.

    Args:
        model: in float32, on its device.
        computes: what forwards compute in.
        identity: what else makes this run another than the next.

    Raises:
        UserError: ``work`` holds the checkpoint of another run.
    """

    SAVE_EVERY = 20  # steps

    def __init__(
        self,
        name: str,
        model: Any,
        writer: Writer,
        samples: list[Sample],
        recipe: ThreadRecipe,
        work: Path,
        computes: torch.dtype,
        identity: dict[str, Any],
    ) -> None:
        self._name, self._model, self._writer, self._recipe, self._computes = name, model, writer, recipe, computes
        self._steps = plan(samples, writer, recipe)
        self._optimizers = make_optimizers(model, recipe)
        self._checkpoint, self._log = work / f"{name}.safetensors", work / "log.jsonl"
        self._identity = {**asdict(recipe), **identity, "dtype": str(computes), "samples": digest(samples)}
        controls = frozenset(token for bound in writer.bound.values() for token in bound.control)
        self._controls = torch.tensor(sorted(controls), device=model.device)

    def run(self) -> None:
        """All steps that are still to do."""
        start = self._resume()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._model.train()
        with Progress(*columns) as progress, self._log.open("a") as log:
            bar = progress.add_task(self._name, total=self._recipe.steps, completed=start)
            for step in range(start, self._recipe.steps):
                figures = self._step(step)
                log.write(json.dumps({"step": step + 1, **figures, "time": round(time.time(), 1)}) + "\n")
                log.flush()
                progress.update(bar, advance=1, description=f"{self._name} loss {figures['loss']:.3f}")
                if (step + 1) % self.SAVE_EVERY == 0 or step + 1 == self._recipe.steps:
                    self._save(step + 1)
        self._model.eval()

    def _step(self, step: int) -> dict[str, float]:
        """One step on its samples; forwards of few tokens each add up their gradients."""
        rows = [row for sample in self._steps[step] for row in self._writer.rows(sample, self._recipe.form)]
        weight = sum(float(self._weights(row.targets[row.targets != IGNORED].to(self._model.device)).sum()) for row in rows)
        sums = {"loss": 0.0, "control": 0.0}
        num_controls = 0
        for batch in batches(rows, self._model.device):
            with torch.autocast(self._model.device.type, dtype=self._computes, enabled=self._computes != torch.float32):
                logits, targets = learned_logits(self._model, batch)
            losses = nn.functional.cross_entropy(logits, targets, reduction="none")
            loss = (losses * self._weights(targets)).sum() / weight
            loss.backward()
            is_control = torch.isin(targets, self._controls)
            sums["loss"] += loss.item()
            sums["control"] += losses.detach()[is_control].sum().item()
            num_controls += int(is_control.sum())
        self._update(self._recipe.rate(step))
        return {
            "loss": round(sums["loss"], 5),
            "control_loss": round(sums["control"] / max(num_controls, 1), 5),
            "tokens": sum(len(row.token_ids) for row in rows),
        }

    def _weights(self, targets: Tensor) -> Tensor:
        return 1 + (self._recipe.control_weight - 1) * torch.isin(targets, self._controls)

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
        self._log.parent.mkdir(parents=True, exist_ok=True)
        start = self._load() if self._checkpoint.exists() else 0
        if self._log.exists():
            kept = self._log.read_text().splitlines(keepends=True)[:start]
            self._log.with_suffix(".partial").write_text("".join(kept))
            self._log.with_suffix(".partial").rename(self._log)
        return start

    def _load(self) -> int:
        with safe_open(self._checkpoint, "pt") as stored:
            metadata = stored.metadata()
        identity = json.loads(metadata["identity"])
        differing = [key for key in self._identity if identity.get(key) != self._identity[key]]
        if differing:
            found = ", ".join(f"{key} {identity.get(key)}" for key in differing)
            raise UserError(f"{self._checkpoint} belongs to another run ({found}): give another --work, or remove it")
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
