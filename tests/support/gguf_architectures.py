"""What llama.cpp's converter writes for each architecture: fields, and changed tensors; written without looking at pipedec's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from support.gguf_hybrids import HYBRIDS, hybrid_fields, hybrid_tensors
from support.gguf_mixtures import mixture_fields, with_stacks

Floats = npt.NDArray[np.float32]
# By model_type of transformers, where the architecture has another name.
NAMES = {
    "mistral": "llama", "ministral3": "mistral3", "gemma3_text": "gemma3", "phi": "phi2", "olmo3": "olmo2", "cohere": "command-r",
    "gpt_neox": "gptneox", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "mixtral": "llama", "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
}  # fmt: skip
_PERMUTED = ("llama", "mistral", "mixtral", "ministral3", "olmo", "granite", "smollm3", "arcee")
_PARTLY_TURNED = ("phi", "phi3", "glm4", "gpt_neox")
_WITHOUT_BASE = ("gemma", "gemma2", "phi", "gpt_neox", "minicpm3")  # their converter does not write rope.freq_base
_WITHOUT_HEAD_DIM = ("phi", "phi3", "starcoder2", "olmo", "olmo2", "olmo3", "cohere", "gpt_neox")
_COPIED = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    "gemma3_text": {"attention.sliding_window": "sliding_window"},
    "olmo": {"attention.clamp_kqv": "clip_qkv"},
    "olmo3": {"attention.sliding_window": "sliding_window"},
    "cohere": {"logit_scale": "logit_scale"},
    "cohere2": {"logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
    "granite": {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier", "logit_scale": "logits_scaling",
        "residual_scale": "residual_multiplier",
    },
    "exaone4": {"attention.sliding_window": "sliding_window"},
    "gpt_neox": {"use_parallel_residual": "use_parallel_residual"},
    "minicpm3": {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"},
}  # fmt: skip
_WITH_PATTERN = ("olmo3", "exaone4")  # the file says which layers have windows; of the others llama.cpp knows it
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata below the architecture's name, by the values in ``config.json``."""
    kind, heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": heads,
    }
    if kind != "gpt_neox":
        values["attention.head_count_kv"] = config.get("num_key_value_heads", heads)
    if "rms_norm_eps" in config:
        values["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    else:
        values["attention.layer_norm_epsilon"] = float(config.get("layer_norm_eps", config.get("norm_epsilon", 1e-5)))
    if kind not in _WITHOUT_HEAD_DIM:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    values["rope.dimension_count"] = int(_rope(config).get("partial_rotary_factor", 1.0) * head_dim)
    if kind in ("olmo2", "olmo3", "gemma3_text"):
        del values["rope.dimension_count"]
    if kind == "minicpm3":
        del values["attention.value_length"]
        values["attention.key_length"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        values["rope.dimension_count"] = config["qk_rope_head_dim"]
    if kind not in _WITHOUT_BASE:
        values["rope.freq_base"] = float(_rope(config)["rope_theta"])
    values |= {name: config[key] for name, key in _COPIED.get(kind, {}).items() if config.get(key) is not None}
    if kind == "phi3":
        values["attention.sliding_window"] = config["sliding_window"] or 0
        values["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if kind in _WITH_PATTERN and config.get("sliding_window"):
        values["attention.sliding_window_pattern"] = [layer == "sliding_attention" for layer in config["layer_types"]]
    return values | hybrid_fields(config) | mixture_fields(config) | _scaling(config)


def file_tensors(config: Mapping[str, Any], tensors: Mapping[str, Floats], is_new: bool = True) -> dict[str, Floats]:
    """The tensors as the file has them, by names that the library's map knows. ``is_new``: as for ``hybrid_tensors``."""
    if config["model_type"] in HYBRIDS:
        return hybrid_tensors(config, tensors, is_new)
    numbers = ".act_fn"  # numbers that are metadata
    found = with_stacks(config, tensors)
    return {name: converted(config, name.rpartition(".")[0], values) for name, values in found.items() if numbers not in name}


def converted(config: Mapping[str, Any], module: str, values: Floats) -> Floats:
    """A tensor of a module as the file has it."""
    kind, projection = config["model_type"], module.rpartition(".")[2]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}.get(projection)
    if kind in _PERMUTED and heads:
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if kind.startswith("gemma") and module.endswith("norm"):
        return values + np.float32(1)
    if projection == "query_key_value":
        each = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        return np.concatenate([each[:, part].reshape(-1, *values.shape[1:]) for part in range(3)])
    return values


def layer_values(config: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Apertus: the numbers of its activation, for each layer."""
    if config["model_type"] != "apertus":
        return {}
    tensors, layers = load_file(checkpoint / "model.safetensors"), range(config["num_hidden_layers"])
    return {
        f"xielu.{name}": [tensors[f"model.layers.{layer}.mlp.act_fn.{name}"].item() for layer in layers]
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    }


def factors(config: Mapping[str, Any]) -> dict[str, Floats]:
    """The factors of wave lengths of scaled rotary embeddings."""
    rope = _rope(config)
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")}
    if rope["rope_type"] != "llama3" or "factor" not in rope or config["model_type"] not in ("apertus", "exaone4"):
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    found = []
    for index in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        if wave < original / high:
            found.append(1.0)
        elif wave > original / low:
            found.append(rope["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(found, np.float32)}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config
    return {"rope_type": "default", **rope.get("full_attention", rope)}


def _scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    if rope["rope_type"] == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        usual = math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"])) if scale > 1 else 1.0
        return {"rope.scaling.attn_factor": usual} if config["model_type"] == "phi3" else {}
    if rope["rope_type"] != "yarn":
        return {}
    values = {
        "type": "yarn", "factor": float(rope["factor"]), "original_context_length": rope["original_max_position_embeddings"],
        **{name: float(rope[key]) for name, key in _YARN.items() if rope.get(key) is not None},
    }  # fmt: skip
    named = {f"rope.scaling.{name}": value for name, value in values.items()}
    if config["model_type"] == "ministral3":
        named |= {"rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"]}
        named |= {"attention.temperature_scale": rope["llama_4_scaling_beta"]}
    return named
