"""Fields and tensors that llama.cpp's converter writes for Qwen3-Next and Qwen3.5; made without looking at pipedec's reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from support.gguf_mixtures import with_stacks

Floats = npt.NDArray[np.float32]
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_TILED = ("qwen3_5_text", "qwen3_5_moe_text")


def hybrid_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata that other architectures do not have."""
    if config["model_type"] not in HYBRIDS:
        return {}
    fields = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }
    if config["model_type"] in _TILED:
        fields["rope.dimension_sections"] = [*config["rope_parameters"].get("mrope_section", (11, 11, 10)), 0]
    return fields


def hybrid_tensors(config: Mapping[str, Any], tensors: Mapping[str, Floats], is_new: bool = True) -> dict[str, Floats]:
    """The tensors as the file has them, by the names that the converter looks for in its map.

    ``is_new``: whether queries, keys, values and gates of Qwen3-Next are separated, which older converters did not do.
    """
    found: dict[str, Floats] = {}
    for name, values in with_stacks(config, tensors).items():
        stored = _tiled(config, name, values) if config["model_type"] in _TILED else values
        if "in_proj_qkvz" in name and is_new:
            found |= {name.replace("qkvz", part): rows for part, rows in _separated(config, stored).items()}
        elif name.endswith("dt_bias"):
            found[name.replace("dt_bias", "dt_proj.bias")] = stored
        elif name.endswith("A_log"):
            found[name] = -np.exp(stored)
        elif "conv1d" in name:
            found[name] = stored.squeeze()
        else:
            adds = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
            found[name] = stored + np.float32(1) if adds else stored
    return found


def _tiled(config: Mapping[str, Any], name: str, values: Floats) -> Floats:
    """Value heads that share a key head are no longer neighbours: first comes the first one of each key head."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_rows, head_dim = 2 * key_heads * config["linear_key_head_dim"], config["linear_value_head_dim"]

    def moved(rows: Floats, dim: int) -> Floats:
        grouped = rows.reshape(key_heads, value_heads // key_heads, dim, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if ".in_proj_qkv." in name or ".conv1d." in name:
        return np.concatenate([values[:key_rows], moved(values[key_rows:], head_dim)])
    if ".in_proj_z." in name:
        return moved(values, head_dim)
    if ".linear_attn.out_proj." in name:
        return moved(values.T, head_dim).T
    if name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        return moved(values, 1)
    return values


def _separated(config: Mapping[str, Any], values: Floats) -> dict[str, Floats]:
    heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value_dim = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    each = values.reshape(heads, -1, values.shape[1])
    parts = np.split(each, (key_dim, 2 * key_dim, 2 * key_dim + value_dim), axis=1)
    *qkv, gate = (part.reshape(-1, values.shape[1]) for part in parts)
    return {"qkv": np.concatenate(qkv), "z": gate}
