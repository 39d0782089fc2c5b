"""From the metadata of a GGUF file to ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pipedec.core.errors import UserError
from pipedec.gguf.architectures import FREQUENCIES, LONG, SHORT, Architecture, File, Windows, architecture_of, latents, shortest

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_FACTORS = (8.0, 32.0, 16.0)  # Llama 3.1 and 3.3; 3.2; EXAONE 4
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
# Fields that change what a model computes. An architecture that has no use for one is refused a file with it.
_CHANGES = (
    "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "embedding_scale", "residual_scale", "attention.scale",
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale", "attention.shared_kv_layers",
    "attention.sliding_window", "nextn_predict_layers", "embedding_length_per_layer_input", "rope.dimension_sections",
    "expert_gating_func", "expert_group_count", "expert_weights_scale", "swiglu_clamp_exp", "swiglu_clamp_shexp",
)  # fmt: skip


def config_of(file: File) -> dict[str, Any]:
    """The contents of ``config.json``.

    Raises UserError if the architecture, its experts, its rotary embedding or another field is not supported, or a size is
    missing.
    """
    found = architecture_of(file.metadata)
    number = file.number
    if number("expert_count", 0) and found.gating is None:
        raise UserError("it is a mixture of experts, which is not supported; use a dense model")
    if number("block_count") > len(file.shapes):
        raise UserError(
            f"it has {len(file.shapes)} tensors, which is too few for {number('block_count')} layers; download it again"
        )
    _check_fields(file, found)
    config = {
        "architectures": [found.class_name],
        "model_type": found.model_type,
        "vocab_size": file.shapes["token_embd.weight"][0],
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length", file.value("expert_feed_forward_length")),
        "num_hidden_layers": file.num_layers,
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv", number("attention.head_count")),
        "head_dim": file.head_dim,
        "max_position_embeddings": number("context_length"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    if found.epsilon is not None:
        kind = "rms_epsilon" if found.epsilon == "rms_norm_eps" else "epsilon"
        config[found.epsilon] = number(f"attention.layer_norm_{kind}")
    config |= {key: number(name) for key, name in found.fields.items()}
    config |= {key: number(name) for key, name in found.optional.items() if file.value(name) is not None}
    config |= {key: f"blk.0.{tensor}" in file.shapes for key, tensor in found.flags.items()}
    if found.windows is not None:
        config |= _windows(file, found.windows)
    config |= found.constants
    config |= found.more(file) if found.more is not None else {}
    config |= _rope(file, found, config)
    present = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    unnamed = {key: config.get(key) for key in ("eos_token_id", "pad_token_id")}  # or defaults of transformers apply
    return present | unnamed


def _check_fields(file: File, found: Architecture) -> None:
    """Raises UserError for fields that would change the formula."""
    usual = {"expert_gating_func": found.gating, "expert_group_count": 1, "expert_weights_scale": 1.0}
    for name in _CHANGES:
        if name in found.known_fields or not (value := file.value(name)) or value == usual.get(name):
            continue
        if name == "attention.sliding_window" and value >= file.number("context_length"):
            continue
        raise UserError(f"its field {file.name}.{name} is {value}, which is not supported for a {found.model_type} model")
    if file.value("attention.causal") is False:
        raise UserError("it does not generate text: its attention is not causal")
    if file.number("attention.value_length", file.head_dim) != file.head_dim and found.more is not latents:
        raise UserError("its values are not as wide as its keys, which is not supported")


def _windows(file: File, windows: Windows) -> dict[str, Any]:
    window = file.number("attention.sliding_window", windows.usual or 0) or None
    if windows.period is None:
        return {"sliding_window": window}
    kind = "sliding_attention" if window else "full_attention"
    return {"sliding_window": window, "layer_types": file.kinds("attention.sliding_window_pattern", windows.period, kind)}


def _rope(file: File, found: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, for each kind of layers where they differ."""
    head_dim, theta = config["head_dim"], float(file.number("rope.freq_base", 10_000.0))
    rotated = file.number("rope.dimension_count", head_dim)
    if rotated != head_dim and not found.partial:
        raise UserError(f"its rotary embedding turns {rotated} of {head_dim} numbers of a head, which is not supported")
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if found.partial:
        base["partial_rotary_factor"] = rotated / head_dim
    if found.sections:
        base["mrope_section"] = (file.value("rope.dimension_sections") or [])[:3]
    scaled = base | _scaling(file, theta, rotated) | {key: file.number(name) for key, name in found.rope_fields.items()}
    scaled |= found.yarn if scaled["rope_type"] == "yarn" else {}
    if found.local:
        local = file.number("rope.freq_base_swa", found.local_theta or theta)
        return {"rope_parameters": {"full_attention": scaled, "sliding_attention": base | {"rope_theta": float(local)}}}
    outside = {"original_max_position_embeddings": scaled["original_max_position_embeddings"]} if LONG in file.factors else {}
    return {"rope_parameters": scaled, **outside}


def _scaling(file: File, theta: float, rotated: int) -> dict[str, Any]:
    if FREQUENCIES in file.factors:
        return _llama3(theta, rotated, file.factors[FREQUENCIES])
    kind = file.value("rope.scaling.type") or "linear"
    if LONG in file.factors or SHORT in file.factors:
        return _longrope(file, rotated)
    factor = file.number("rope.scaling.factor", file.number("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = file.value("rope.scaling.original_context_length")
    is_usual = file.number("rope.scaling.yarn_ext_factor", 1.0) == 1.0
    flat = file.number("rope.scaling.yarn_log_multiplier", 0.0)
    if kind == "yarn" and original and is_usual and flat in (0.0, 1.0):
        numbers = {key: file.number(f"rope.scaling.{name}", math.nan) for key, name in _YARN.items()}
        mscale = {"mscale": 1.0, "mscale_all_dim": 1.0} if flat else {}
        numbers = {key: number for key, number in numbers.items() if not math.isnan(number)}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **numbers, **mscale}
    raise UserError(f"its rotary embedding is scaled by {kind!r}, which is not supported")


def _llama3(base: float, head_dim: int, frequencies: Sequence[float]) -> dict[str, Any]:
    """The scaling of Llama 3, found from the factors of wave lengths that it results in, which is all that GGUF has."""
    low, high, original = _LLAMA3.values()
    waves = [2 * math.pi * base ** (index / head_dim) for index in range(0, head_dim, 2)]
    smooth = [min(max((original / wave - low) / (high - low), 0.0), 1.0) for wave in waves]
    for factor in _LLAMA3_FACTORS:
        wanted = [1 / ((1 - share) / factor + share) for share in smooth]
        if len(wanted) == len(frequencies) and all(map(partial(math.isclose, rel_tol=1e-3), wanted, frequencies)):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise UserError("its rope_freqs.weight are not those of Llama 3.1, 3.2 or 3.3, and no others are supported")


def _longrope(file: File, rotated: int) -> dict[str, Any]:
    """Two lists of factors, for texts within the original context and for longer ones."""
    factors = {name: [shortest(float(factor)) for factor in file.factors.get(name, ())] for name in (LONG, SHORT)}
    if any(len(values) != rotated // 2 for values in factors.values()):
        raise UserError(f"its {LONG} and {SHORT} do not both have {rotated // 2} values; convert the model again")
    context = file.number("context_length")
    original = file.number("rope.scaling.original_context_length", context)
    scale = context / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    given = file.number("rope.scaling.attn_factor", usual if original != context else 1.0)
    attention = {} if math.isclose(given, usual, rel_tol=1e-5) else {"attention_factor": given}
    long, short = factors.values()
    return {
        "rope_type": "longrope", "long_factor": long, "short_factor": short, "original_max_position_embeddings": original,
        **attention,
    }  # fmt: skip
