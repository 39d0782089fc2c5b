"""AWQ, as AutoAWQ and GPTQModel write it: 4 bits, packed along the outputs (version ``gemm``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipedec.formats.affine import Affine, Integers, Scales
from pipedec.formats.base import PLAIN, Format, Formats
from pipedec.formats.by_module import HEAD, ModuleFormats, choice, group_size, is_named, names

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def awq_matrix(group: int, method: str = "AWQ") -> Affine:
    """[K, N / 8] numbers, and [K / group, N / 8] zero points and [K / group, N] scales."""
    codes, zeros = (Integers(suffix, "outputs", is_transposed=True, order=ORDER) for suffix in ("qweight", "qzeros"))
    return Affine(method, 4, group, codes, Scales("scales", is_transposed=True), zeros)


def awq_formats(quantization: Mapping[str, Any]) -> Formats:
    """Raises UserError for versions other than ``gemm``, and for sizes that are not supported."""
    values = {"bits": quantization.get("w_bit"), "group_size": quantization.get("q_group_size", 128), **quantization}
    version = values.get("version") or values.get("format") or values.get("checkpoint_format") or "gemm"
    version = "llm-awq" if values.get("backend") == "llm-awq" else version
    choice({"version": str(version).lower()}, "version", ("gemm",))
    choice(values, "bits", (4,))
    has_head = choice(values, "lm_head", (True, False), False)
    skipped, format = names(values, "modules_to_not_convert"), awq_matrix(group_size(values))

    def rule(module: str) -> Format:
        is_plain = is_named(module, skipped) or (module == HEAD and not has_head)
        return PLAIN if is_plain else format

    return ModuleFormats(rule, format.title)
