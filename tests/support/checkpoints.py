"""Random tiny models saved as real Hugging Face safetensors checkpoints, for every test that needs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipedec.families import model_by_name
from pipedec.formats import WeightFormat
from pipedec.plan.costs import ModelCosts

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
}
OTHERS = {"qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM)}  # as transformers' modules alone
HYBRID: dict[str, Any] = {  # of qwen3_5_text, with four layers
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "head_dim": 8,
}  # fmt: skip


def save_tiny(
    family: str,
    path: Path,
    layers: int = 4,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 64,
    seed: int = 0,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **config_kwargs: Any,
) -> PreTrainedModel:
    """Save a random model of the family; return it in evaluation mode.

    Weights are large enough for tokens to depend on their whole context, and biases and norms are not trivial.
    """
    config_class, model_class = (FAMILIES | OTHERS)[family]
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config_kwargs,
    }
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config_class(**values)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name
            parameter.copy_(1 + 0.2 * noise if is_norm else noise * (1.5 / hidden**0.5 if parameter.dim() == 2 else 0.3))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def save_tiny_llama(path: Path, **kwargs: Any) -> PreTrainedModel:
    """A random LLaMA (4 layers, hidden 32, 4 heads, 2 key-value heads, 64 tokens unless said otherwise)."""
    return save_tiny("llama", path, **kwargs)


def stage_parameters(directory: Path, layers: range) -> int:
    """Parameters of a stage with these layers, as a plan counts them by the shape of the checkpoint."""
    shape = model_by_name(str(directory))
    costs = ModelCosts(shape, WeightFormat("float32"), rows=0, max_model_len=0, passage=1)
    return costs.weight_bytes(layers, layers.start == 0, layers.stop == shape.num_hidden_layers) // 4
