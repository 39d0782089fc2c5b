"""The model of a checkpoint as transformers has it: to train, to learn from, to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipedec.gguf import is_gguf, model_files
from pipedec.model.checkpoint import HEAD, Checkpoint


def load_transformers(model: Path, dtype: torch.dtype, device: torch.device | str = "cpu", **options: Any) -> Any:
    """A causal language model, not in training mode.

    Args:
        model: the directory of a checkpoint, or a GGUF file, which is de-quantised.
        options: for ``from_pretrained`` or ``from_config``.
    """
    from transformers import AutoModelForCausalLM

    if not is_gguf(model):
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True, **options).to(device).eval()
    return _from_gguf(model, dtype, options).to(device).eval()


@torch.no_grad()
def _from_gguf(model: Path, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory = model_files(model)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype, **options)
    checkpoint = Checkpoint(model)
    checkpoint.read_into({name: tensor for name, tensor in made.state_dict().items() if name != HEAD or HEAD in checkpoint})
    made.tie_weights()
    made.generation_config = GenerationConfig.from_pretrained(directory)
    return made
