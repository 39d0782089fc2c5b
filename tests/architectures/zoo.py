"""Tiny random models of every causal architecture of transformers that has a pipeline plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

LAYERS, VOCABULARY = 5, 64
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENTS = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
_RECURRENT = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]}
_DELTA_HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_KIMI_HEADS = {"linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense"] * LAYERS}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# What the sizes above do not fit, or what an architecture has besides its usual form.
_OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},  # as in its largest dense model
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "qwen3_5_text": _RECURRENT | _DELTA_HEADS,
    "qwen3_next": _RECURRENT | _DELTA_HEADS | {"num_experts": 0, "mlp_only_layers": list(range(LAYERS))},
    "olmo_hybrid": _RECURRENT | _DELTA_HEADS | {"linear_num_key_heads": 4},
    "kimi_linear": _RECURRENT | _KIMI_HEADS,
    "bailing_hybrid": _RECURRENT | _KIMI_HEADS,
}


@cache
def architectures() -> tuple[str, ...]:
    """The ``model_type`` of each, by name."""
    return tuple(sorted(kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind.base_model_pp_plan is not None))


def tiny_config(model_type: str, **changes: Any) -> Any:
    """As small as the architecture allows, with windows of 8 where it has windows. ``changes``: keys with other values."""
    usual = AutoConfig.for_model(model_type)
    sizes = {name: size for name, size in _SIZES.items() if name in usual.to_dict()}
    if hasattr(usual, "kv_lora_rank"):
        sizes |= {name: size for name, size in _LATENTS.items() if hasattr(usual, name)}
        sizes.pop("head_dim", None)
    if "sliding_attention" in (getattr(usual, "layer_types", None) or ()):
        sizes["layer_types"] = _LAYER_TYPES
    return AutoConfig.for_model(model_type, **sizes | _OWN.get(model_type, {}) | changes)


def save_config(model_type: str, folder: Path) -> None:
    """The tiny config, or, where the architecture does not allow its sizes, the usual one, without weights."""
    try:
        config = tiny_config(model_type)
    except Exception:  # of any type: it is the architecture's own check
        config = AutoConfig.for_model(model_type)
    config.save_pretrained(folder)


def save_model(model_type: str, folder: Path, **changes: Any) -> None:
    """With weights that are large enough for tokens to depend on their whole context, and norms that are not trivial.

    ``changes``: see ``tiny_config``.
    """
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
            else:
                parameter.copy_(parameter + 0.2 * noise if "norm" in name else 0.3 * noise)
        embedding = model.get_input_embeddings()
        if embedding.padding_idx is not None:
            embedding.weight[embedding.padding_idx] = 0.0  # as some architectures make it when they are loaded
    model.save_pretrained(folder)
