"""AutoRound: matrices as those of GPTQ or AWQ, with bits and groups that may differ from layer to layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipedec.formats.awq import awq_matrix
from pipedec.formats.base import PLAIN, Format, Formats
from pipedec.formats.by_module import FULL_PRECISION, HEAD, ModuleFormats, choice, group_size, names, pattern, sections
from pipedec.formats.gptq import gptq_matrix

PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq")
_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")  # what makes the name of a layer a regular expression
_METHOD = "AutoRound"


def autoround_formats(quantization: Mapping[str, Any]) -> Formats:
    """Raises UserError for a packing, a type of numbers, or bits that are not supported."""
    packing = choice(quantization, "packing_format", PACKINGS, PACKINGS[0])
    blocks, layers = _blocks(quantization), sections(quantization, "extra_config")
    named = {name: _matrix({**quantization, **values}, packing) for name, values in layers.items()}
    matching = [(pattern(name), format) for name, format in named.items() if _SPECIAL.search(name)]
    usual = _matrix(quantization, packing)
    known = [quantization, *layers.values()]
    are_rounded = any(isinstance(one.get("act_bits"), int) and one["act_bits"] < 16 for one in known)

    def rule(module: str) -> Format:
        if module in named:
            return named[module]
        found = next((format for one, format in matching if one.search(module)), None)
        if found is not None:
            return found
        return usual if module != HEAD and (not blocks or module.startswith(blocks)) else PLAIN

    return ModuleFormats(rule, usual.title, (FULL_PRECISION,) if are_rounded else ())


def _matrix(values: Mapping[str, Any], packing: str) -> Format:
    if choice(values, "bits", (4, 8, 16)) == 16:
        return PLAIN
    choice(values, "data_type", ("int",), "int")
    if packing.endswith("awq"):
        choice(values, "bits", (4,))
        return awq_matrix(group_size(values), _METHOD)
    return gptq_matrix({**values, "desc_act": False}, 1, _METHOD)


def _blocks(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """The beginnings of the names of quantized modules; empty for any."""
    found = quantization.get("block_name_to_quantize") or quantization.get("to_quant_block_names") or []
    text = {"block_name_to_quantize": found.split(",") if isinstance(found, str) else found}
    return tuple(f"{one.strip()}." for one in names(text, "block_name_to_quantize"))
