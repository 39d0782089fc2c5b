"""A BiTA that has learned nothing, saved for a target as a trained one would be."""

from __future__ import annotations

from pathlib import Path

import torch

from pipedec.checkpoints import fingerprint
from pipedec.families import model_config
from pipedec.model import BitaConfig, BitaWeights
from pipedec.model.markov import MarkovTable


def save_random_bita(
    directory: Path, target: Path, num_masks: int = 3, num_prompt_tokens: int = 5, std: float = 1.0, seed: int = 0,
    markov_rank: int = 4,
) -> BitaWeights:  # fmt: skip
    """Save random keys, values, embeddings and a Markov table for the checkpoint ``target``; return the weights of all layers."""
    config = model_config(target)
    generator = torch.Generator().manual_seed(seed)
    cached = config.layers[0].cached
    prompt = torch.randn(len(config.layers), 2, cached.num_heads, num_prompt_tokens, cached.key_dim, generator=generator)
    masks = torch.randn(num_masks, config.hidden_size, generator=generator)
    weights = BitaWeights(std * prompt, std * masks)
    about = BitaConfig(fingerprint(target), num_masks, num_prompt_tokens, "deep" if num_prompt_tokens else "none", markov_rank)
    shapes = MarkovTable.shapes(config.vocab_size, num_masks, markov_rank)
    weights.save(directory, about, {name: std * torch.randn(shape, generator=generator) for name, shape in shapes.items()})
    return weights
