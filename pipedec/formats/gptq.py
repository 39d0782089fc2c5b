"""GPTQ, as AutoGPTQ and GPTQModel write it: 4 or 8 bits, packed along the inputs.

The first version of the format stores zero points less 1. ``checkpoint_format`` names the version, often a wrong one. Symmetric
weights do not depend on it, as all of their zero points are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipedec.formats.affine import Affine, Integers, Scales
from pipedec.formats.base import PLAIN, Format, Formats
from pipedec.formats.by_module import HEAD, ModuleFormats, choice, group_size, is_named, names, pattern, sections

VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is added to zero points


def gptq_matrix(values: Mapping[str, Any], added: int, method: str = "GPTQ") -> Affine:
    """[K · bits / 32, N] numbers, [K / group, N · bits / 32] zero points, [K / group, N] scales, and the groups [K].

    Raises UserError for bits or a group that are not supported.
    """
    bits, group = choice(values, "bits", (4, 8)), group_size(values)
    is_symmetric = choice(values, "sym", (True, False), True)
    zeros = Integers("qzeros", "outputs", is_transposed=True, added=0 if is_symmetric else added)
    is_ordered = choice(values, "desc_act", (True, False), False) and group > 0
    return Affine(
        method, bits, group, Integers("qweight", "columns", is_transposed=True), Scales("scales", is_transposed=True),
        None if is_symmetric else zeros, zeros if is_symmetric else None, "g_idx", is_ordered, left_out=("bias",),
    )  # fmt: skip


def gptq_formats(quantization: Mapping[str, Any]) -> Formats:
    """Raises UserError for bits, versions or exceptions that are not supported."""
    named = {"version": quantization.get("checkpoint_format") or quantization.get("format") or "gptq"}
    if quantization.get("is_marlin_format"):
        named["version"] = "marlin"
    added = VERSIONS[choice(named, "version", tuple(VERSIONS))]
    format, skipped = gptq_matrix(quantization, added), names(quantization, "modules_to_not_convert")
    chosen, has_head = names(quantization, "modules_in_block_to_quantize"), choice(quantization, "lm_head", (True, False), False)
    exceptions = [(one, _exception(one, values, quantization, added)) for one, values in _dynamic(quantization).items()]

    def rule(module: str) -> Format:
        for one, exception in exceptions:
            if re.match(one.removeprefix("+:").removeprefix("-:"), module):
                return exception
        is_left = is_named(module, skipped) or (module == HEAD and not has_head)
        is_chosen = not chosen or module == HEAD or module.endswith(chosen)
        return format if is_chosen and not is_left else PLAIN

    return ModuleFormats(rule, format.title)


def _dynamic(quantization: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The exceptions, by regular expression; ``-:`` before it for modules that are not quantized."""
    found = quantization.get("dynamic")
    if isinstance(found, dict):
        found = {one: values or {} for one, values in found.items()}
    return sections({"dynamic": found}, "dynamic")


def _exception(text: str, values: Mapping[str, Any], quantization: Mapping[str, Any], added: int) -> Format:
    pattern(text.removeprefix("+:").removeprefix("-:"))
    return PLAIN if text.startswith("-:") else gptq_matrix({**quantization, **values}, added)
