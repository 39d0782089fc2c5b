"""Tiny random models of every causal architecture of transformers that has a pipeline plan, and of some multimodal ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from pipedec.families.multimodal import auto_class

LAYERS, VOCABULARY = 5, 64
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXTURE = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "num_expert_group"), 4), "topk_group": 2,  # a row's experts are in two of four groups
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32, "zero_expert_num": 2, "expert_ffn_hidden_size": 48,
}  # fmt: skip
_LATENTS = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
_HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]}
_DELTA_HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_KIMI_HEADS = {"linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)]}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# What the sizes above do not fit, or what an architecture has besides its usual form.
_OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},  # as in its largest dense model
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "qwen3_5_text": _HYBRID | _DELTA_HEADS,
    "qwen3_next": _HYBRID | _DELTA_HEADS,
    "qwen3_5_moe_text": _HYBRID | _DELTA_HEADS,
    "olmo_hybrid": _HYBRID | _DELTA_HEADS | {"linear_num_key_heads": 4},
    "kimi_linear": _HYBRID | _KIMI_HEADS,
    "bailing_hybrid": _HYBRID | _KIMI_HEADS,
}
_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
    "deepstack_visual_indexes": [], "fullatt_block_indexes": [0],
}  # fmt: skip
_THREE_AXES = {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}}
_SOME_OF_THREE_AXES = {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
MULTIMODAL: dict[str, dict[str, Any]] = {  # with what the text model of each has besides
    "gemma3": {}, "gemma4": _OWN["gemma4_text"], "mistral3": {}, "qwen2_5_vl": _THREE_AXES, "qwen3_vl": _THREE_AXES,
    "qwen3_5": _DELTA_HEADS | _SOME_OF_THREE_AXES, "qwen3_5_moe": _DELTA_HEADS | _SOME_OF_THREE_AXES,
    "qwen3_vl_moe": _THREE_AXES | {"sliding_window": None}, "kimi_k25": {},
}  # fmt: skip


@cache
def architectures() -> tuple[str, ...]:
    """The ``model_type`` of each, by name."""
    return tuple(sorted(kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind.base_model_pp_plan is not None))


def tiny_config(model_type: str, **changes: Any) -> Any:
    """As small as the architecture allows, with windows of 8 where it has windows. ``changes``: keys with other values."""
    return AutoConfig.for_model(model_type, **_tiny_sizes(AutoConfig.for_model(model_type)) | _OWN.get(model_type, {}) | changes)


def tiny_multimodal_config(model_type: str, **changes: Any) -> Any:
    """One of ``MULTIMODAL``, with a tower for images of one layer. ``changes``: keys of the text model with other values."""
    text = AutoConfig.for_model(model_type).text_config
    tower = AutoConfig.for_model("gemma4_vision") if model_type == "gemma4" else AutoConfig.for_model(model_type).vision_config
    return AutoConfig.for_model(
        model_type,
        text_config={"model_type": text.model_type} | _tiny_sizes(text) | MULTIMODAL[model_type] | changes,
        vision_config={"model_type": tower.model_type} | {name: size for name, size in _TOWER.items() if hasattr(tower, name)},
        **dict.fromkeys(("image_token_id", "image_token_index", "video_token_id"), VOCABULARY),  # no token of the text
    )


def _tiny_sizes(usual: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {name: size for name, size in (_SIZES | _MIXTURE).items() if name in usual.to_dict()}
    if hasattr(usual, "kv_lora_rank"):
        sizes |= {name: size for name, size in _LATENTS.items() if hasattr(usual, name)}
        sizes.pop("head_dim", None)
    if "sliding_attention" in (getattr(usual, "layer_types", None) or ()):
        sizes["layer_types"] = _LAYER_TYPES
    return sizes


def save_config(model_type: str, folder: Path) -> None:
    """The tiny config, or, where the architecture does not allow its sizes, the usual one, without weights."""
    try:
        config = tiny_config(model_type)
    except Exception:  # of any type: it is the architecture's own check
        config = AutoConfig.for_model(model_type)
    config.save_pretrained(folder)


def save_model(model_type: str, folder: Path, **changes: Any) -> None:
    """With weights that are large enough for tokens to depend on their whole context, and norms that are not trivial.

    ``changes``: see ``tiny_config`` and ``tiny_multimodal_config``.
    """
    config = (tiny_multimodal_config if model_type in MULTIMODAL else tiny_config)(model_type, **changes)
    model: PreTrainedModel = auto_class(config).from_config(config, experts_implementation="eager").eval()
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
