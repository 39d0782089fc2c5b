"""A BiTA that has learned nothing, saved for a target as a trained one would be."""

from __future__ import annotations

from pathlib import Path

import torch

from pipedec.checkpoints import fingerprint
from pipedec.model import BitaConfig, BitaWeights, ModelConfig


def save_random_bita(
    directory: Path, target: Path, num_masks: int = 3, num_prompt_tokens: int = 5, std: float = 1.0, seed: int = 0
) -> BitaWeights:
    """Save random keys, values and embeddings for the checkpoint ``target``; return them, of all layers."""
    config = ModelConfig.from_directory(target)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randn(config.num_layers, 2, config.num_kv_heads, num_prompt_tokens, config.head_dim, generator=generator)
    masks = torch.randn(num_masks, config.hidden_size, generator=generator)
    weights = BitaWeights(std * prompt, std * masks)
    about = BitaConfig(fingerprint(target), num_masks, num_prompt_tokens, "deep" if num_prompt_tokens else "none")
    weights.save(directory, about)
    return weights
