"""From the metadata of a GGUF file to ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from pipedec.core import UserError

# model_type of transformers, by architecture of GGUF. A Mistral is a llama there.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.3; 3.2


def config_of(metadata: Mapping[str, Any], tensors: Collection[str], vocab_size: int, frequencies: Any | None) -> dict[str, Any]:
    """The contents of ``config.json``.

    Args:
        metadata: all fields of the file.
        tensors: names of all tensors of the file.
        frequencies: the tensor ``rope_freqs.weight``, factors of wave lengths; None if there is none.

    Raises:
        UserError: the architecture, its experts or its rotary embedding are not supported, or a size is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(f"its architecture {architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}")

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise UserError(f"it has no field {architecture}.{name}; convert the model again")
        if not isinstance(value, int | float):
            raise UserError(f"its {architecture}.{name} is not one number for all layers, which is not supported")
        return value

    if field("expert_count", 0):
        raise UserError("it is a mixture of experts, which is not supported; use a dense model")
    if field("block_count") > len(tensors):
        raise UserError(f"it has {len(tensors)} tensors, which is too few for {field('block_count')} layers; download it again")
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // heads)
    if (rotated := field("rope.dimension_count", head_dim)) != head_dim:
        raise UserError(f"its rotary embedding turns {rotated} of {head_dim} numbers of a head, which is not supported")
    return {
        "architectures": [_CLASSES[architecture]],
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(metadata, architecture, head_dim, frequencies),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def end_tokens_of(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in named if token is not None))


def _scaling(metadata: Mapping[str, Any], architecture: str, head_dim: int, frequencies: Any | None) -> dict[str, Any] | None:
    if frequencies is not None:
        return _llama3(metadata.get(f"{architecture}.rope.freq_base", 10_000.0), head_dim, frequencies)
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = metadata.get(f"{architecture}.rope.scaling.factor", 1.0)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    if kind == "yarn" and original:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UserError(f"its rotary embedding is scaled by {kind!r}, which is not supported")


def _llama3(base: float, head_dim: int, frequencies: Any) -> dict[str, Any]:
    """GGUF has the factors of wave lengths that Llama 3's scaling results in: find the scaling."""
    for factor in _LLAMA3_FACTORS:
        wanted = _llama3_factors(base, head_dim, factor)
        if len(wanted) == len(frequencies) and all(map(_nearly_equal, wanted, frequencies)):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise UserError("its rope_freqs.weight are not those of Llama 3.1, 3.2 or 3.3, and no others are supported")


def _llama3_factors(base: float, head_dim: int, factor: float) -> list[float]:
    original, low, high = (_LLAMA3[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    waves = [2 * math.pi * base ** (index / head_dim) for index in range(0, head_dim, 2)]
    smooth = [min(max((original / wave - low) / (high - low), 0.0), 1.0) for wave in waves]
    return [1 / ((1 - share) / factor + share) for share in smooth]


def _nearly_equal(wanted: float, found: float) -> bool:
    return math.isclose(wanted, found, rel_tol=1e-3)
