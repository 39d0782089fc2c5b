"""Fields and tensors that llama.cpp's converter writes for mixtures of experts; made without looking at pipedec's reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_SIGMOID = 2
_COPIED = {
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"), "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",), "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",), "expert_shared_count": ("n_shared_experts",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "leading_dense_block_count": ("first_k_dense_replace",), "expert_weights_scale": ("routed_scaling_factor",),
}  # fmt: skip


def mixture_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata that dense models do not have."""
    fields = {name: config[key] for name, keys in _COPIED.items() for key in keys if config.get(key) is not None}
    if config["model_type"] == "gpt_oss":
        fields |= {
            "expert_feed_forward_length": config["intermediate_size"],
            "attention.sliding_window": config["sliding_window"],
        }
    if config["model_type"] == "glm4_moe":
        fields |= {"expert_gating_func": _SIGMOID, "expert_weights_norm": config["norm_topk_prob"]}
    return fields


def with_stacks(config: Mapping[str, Any], tensors: Mapping[str, Floats]) -> dict[str, Floats]:
    """All tensors, of which those of experts are stacks, by the names that the converter looks for in its map."""
    if config["model_type"] == "gpt_oss":
        return {own: values for name, each in tensors.items() for own, values in _apart(name, each).items()}
    found: dict[str, Floats] = {}
    experts: dict[str, list[Floats]] = {}
    for name, values in sorted(tensors.items()):  # experts in order, as there are no more than ten
        front, inside, back = name.partition(".experts.")
        if inside:
            experts.setdefault(f"{front}.experts.{back.partition('.')[2]}", []).append(values)
        else:
            found[name.replace("correction_bias", "correction.bias")] = values
    return found | {name: np.stack(each) for name, each in experts.items()}


def _apart(name: str, values: Floats) -> dict[str, Floats]:
    """gpt-oss as GGUF has it: the gates' rows apart from the others, and outputs before inputs."""
    if name.endswith("sinks"):
        return {f"{name}.weight": values}
    if ".experts." not in name:
        return {name: values}
    if name.endswith("_bias"):
        name = name.replace("_bias", ".bias")
    else:
        name, values = f"{name}.weight", values.swapaxes(1, 2)
    if "gate_up_proj" not in name:
        return {name: values}
    return {name.replace("gate_up", part): values[:, place::2] for place, part in enumerate(("gate", "up"))}
