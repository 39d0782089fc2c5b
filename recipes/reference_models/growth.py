"""Train a LLaMA that grows: it starts with few layers, which are doubled between the phases of its training.

Owns phases and growth. Checkpoints and steps are the training loop's; it does not know where rows come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipedec.train.draft.training import Loss, row_steps
from pipedec.train.loop import TrainingLoop, linear_decay, muon_and_adamw, warm_up

Phases = tuple[tuple[int, int], ...]  # (layers, steps) of each


@dataclass(frozen=True)
class GrowingTrainer:
    """Runs the phases of a model; each keeps a checkpoint in ``work``, from which a killed run continues.

    Attributes:
        recipe: a ``Recipe`` of ``pair``.
        compiled: use torch.compile.
    """

    recipe: Any
    work: Path
    device: str
    compiled: bool

    def run(self, name: str, model: LlamaForCausalLM, phases: Phases, rows: Tensor, loss_of: Loss) -> LlamaForCausalLM:
        """Train through ``phases`` and return the last model. Each phase continues in the rows where the last one stopped."""
        recipe, first_row = self.recipe, 0
        for index, (layers, steps) in enumerate(phases):
            if model.config.num_hidden_layers != layers:
                model = deepen(model, layers)
            model = model.to(self.device)
            used = steps * recipe.batch
            phase_rows = rows[torch.arange(first_row, first_row + used) % len(rows)].view(steps, recipe.batch, -1)
            optimizers = muon_and_adamw(model, recipe.learning_rate, recipe.weight_decay)
            loop = TrainingLoop(f"{name}-phase{index}", model, optimizers, self.work, asdict(recipe))
            rate = partial(self._rate, steps=steps, is_last=index == len(phases) - 1)
            loop.run(steps, rate, row_steps(model, phase_rows, loss_of, self.device, self.compiled))
            first_row += used
        return model

    def _rate(self, step: int, steps: int, is_last: bool) -> float:
        """Linear warm-up in every phase, linear decay to a twentieth in the last one."""
        factor = warm_up(step, self.recipe.warmup_steps)
        rate: float = self.recipe.learning_rate * (factor * linear_decay(step, steps) if is_last else factor)
        return rate


def deepen(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Double the depth without changing the function: every layer is followed by a copy whose output projections are zero."""
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


def next_token_loss(model: Callable[..., Any], ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of every next token."""
    logits = model(input_ids=ids_BT).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())


def distillation_loss(model: Callable[..., Any], ids_BT: Tensor, teacher: Callable[..., Any]) -> Tensor:
    """KL divergence from the teacher's distribution to the model's, per token."""
    with torch.no_grad():
        teacher_log_probs = teacher(input_ids=ids_BT).logits.float().log_softmax(-1).flatten(0, 1)
    log_probs = model(input_ids=ids_BT).logits.float().log_softmax(-1).flatten(0, 1)
    return nn.functional.kl_div(log_probs, teacher_log_probs, log_target=True, reduction="batchmean")
