"""The formats in which models are often published, for plans of models without files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.formats.base import Format, Formats
from pipedec.formats.ggml import Ggml
from pipedec.formats.quantization import stated_formats

DESCRIPTIONS: dict[str, Mapping[str, Any]] = {  # each a ``quantization_config``
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "checkpoint_format": "gptq",
    },
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": ["shared_expert_gate"],
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "mxfp4": {"quant_method": "mxfp4"},
    "nf4": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    },
}  # fmt: skip


class Q4KM(Formats):
    """llama.cpp's mixture of this name: 4 bits, and 6 for the head and, in half of the layers, for values and the MLP's output.

    Args:
        num_layers: of the model.
        is_tied: whether the embedding is the head, too.
    """

    title = "Q4_K_M"

    def __init__(self, num_layers: int, is_tied: bool) -> None:
        self._num_layers, self._head = num_layers, "embed_tokens" if is_tied else "lm_head"

    def stated(self, name: str) -> Format:
        *parents, module, _ = name.split(".")
        layers = [int(part) for part in parents if part.isdigit()]
        is_chosen = module in ("v_proj", "down_proj") and self._has_more_bits(layers[0]) if layers else module == self._head
        return Ggml("Q6_K" if is_chosen else "Q4_K")

    def _has_more_bits(self, layer: int) -> bool:
        eighth = self._num_layers // 8
        return layer < eighth or layer >= 7 * self._num_layers // 8 or (layer - eighth) % 3 == 2


def typical_formats(name: str, num_layers: int, is_tied: bool) -> Formats:
    """A format by the suffix of a model's name, such as ``awq``. Raises UserError, with the list, for another one."""
    if name == "q4_k_m":
        return Q4KM(num_layers, is_tied)
    if name not in DESCRIPTIONS:
        raise UserError(f"{shortened(name)!r} is no format of a known model: choose {', '.join(DESCRIPTIONS)} or q4_k_m")
    return stated_formats(DESCRIPTIONS[name])
