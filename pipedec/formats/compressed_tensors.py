"""compressed-tensors, as llm-compressor writes it: schemes of integers or 8-bit floating-point numbers for groups of modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.formats.affine import Affine, Integers, Scales
from pipedec.formats.base import PLAIN, Format, Formats
from pipedec.formats.by_module import FULL_PRECISION, ModuleFormats, choice, group_size, names, pattern, sections
from pipedec.formats.float8 import Float8

METHOD = "compressed-tensors"
PACKED, PLAIN_INTEGERS, FLOATS = "pack-quantized", ("int-quantized", "naive-quantized"), ("float-quantized", "naive-quantized")
LINEAR = "Linear"  # the class of modules that are quantized
_GROUP_ORDERS = ("group", "dynamic", True)  # values of ``actorder`` with which the groups of the inputs are in the file


def compressed_tensors_formats(quantization: Mapping[str, Any]) -> Formats:
    """Raises UserError for what would change answers and is not supported: a quantized cache, sparsity, transforms, and formats
    of other numbers.
    """
    _check_supported(quantization)
    groups, ignored = sections(quantization, "config_groups"), names(quantization, "ignore")
    formats: dict[str, Format] = {}
    for group in groups.values():
        weights, kind = group.get("weights"), group.get("format") or quantization.get("format")
        if not isinstance(weights, dict | None):
            raise UserError(f"quantization_config: weights must be a mapping, not {shortened(weights)}")
        format = PLAIN if weights is None else _matrix(weights, kind)
        formats |= dict.fromkeys(names(group, "targets"), format)
    for target in (*formats, *ignored):
        if target.startswith("re:"):
            pattern(target[3:])
    titles = dict.fromkeys(format.title for format in formats.values() if format is not PLAIN)
    if not titles:
        raise UserError("quantization_config: config_groups names no weights")

    def rule(module: str) -> Format:
        closest = min(((-_closeness(one, module), one) for one in formats if _closeness(one, module)), default=None)
        is_ignored = any(_closeness(one, module) for one in ignored)
        return PLAIN if closest is None or is_ignored else formats[closest[1]]

    are_rounded = any(group.get(one) for group in groups.values() for one in ("input_activations", "output_activations"))
    return ModuleFormats(rule, " and ".join(titles), (FULL_PRECISION,) if are_rounded else ())


def _check_supported(quantization: Mapping[str, Any]) -> None:
    if quantization.get("kv_cache_scheme"):
        raise UserError("quantization_config: kv_cache_scheme is not supported: choose a checkpoint without a quantized cache")
    if quantization.get("transform_config"):
        raise UserError("quantization_config: transform_config is not supported: choose a checkpoint without transforms")
    sparsity = quantization.get("sparsity_config") or {}
    kind = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if kind != "dense":
        raise UserError(f"quantization_config: sparsity_config {shortened(kind)} is not supported: choose a dense checkpoint")


def _closeness(target: str, module: str) -> int:
    """Rank of a target that names the module: 3 by its name, 2 by a regular expression, 1 by its class; 0 if it does not."""
    if target.startswith("re:"):
        return 2 if re.match(target[3:], module) else 0
    return 3 if target == module else int(target == LINEAR)


def _matrix(weights: Mapping[str, Any], kind: Any) -> Format:
    known = (PACKED, *dict.fromkeys((*PLAIN_INTEGERS, *FLOATS)))
    choice({"format": kind}, "format", known)
    strategy = weights.get("strategy") or _strategy(weights)
    if choice(weights, "type", ("int", "float"), "int") == "float":
        choice({"format": kind}, "format", FLOATS)
        choice(weights, "num_bits", (8,), 8)
        return _float8(weights, strategy)
    choice({"format": kind}, "format", (PACKED, *PLAIN_INTEGERS))
    choice({"strategy": strategy}, "strategy", ("tensor", "channel", "group"))
    is_packed = kind == PACKED
    bits = choice(weights, "num_bits", (4, 8) if is_packed else (8,), 8)
    group = group_size(weights) if strategy == "group" else 0
    is_symmetric = choice(weights, "symmetric", (True, False), True)
    codes = Integers("weight_packed") if is_packed else Integers("weight", "none", added=1 << (bits - 1))
    zeros = Integers("weight_zero_point", "outputs" if is_packed else "none", added=0 if is_packed else 1 << (bits - 1))
    has_order = group > 0 and weights.get("actorder") in _GROUP_ORDERS
    return Affine(
        METHOD, bits, group, codes, Scales("weight_scale", is_single=strategy == "tensor"), None if is_symmetric else zeros,
        groups="weight_g_idx" if has_order else None, is_ordered=has_order,
        left_out=("weight_shape", "input_scale", "input_zero_point", "output_scale", "output_zero_point")
        + ("weight_zero_point",) * is_symmetric,
    )  # fmt: skip


def _strategy(weights: Mapping[str, Any]) -> str:
    """That which a description means that names none."""
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _float8(weights: Mapping[str, Any], strategy: Any) -> Format:
    choice({"strategy": strategy}, "strategy", ("tensor", "channel", "group", "block"))
    if strategy == "group":
        return Float8(scale="weight_scale", block=(1, group_size(weights)))
    if strategy != "block":
        return Float8(scale="weight_scale", block=(0, 0) if strategy == "tensor" else (1, 0))
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or not all(type(one) is int and one > 0 for one in block):
        raise UserError(f"quantization_config: block_structure must be two numbers of rows and columns, not {shortened(block)}")
    return Float8(scale="weight_scale", block=(block[0], block[1]))
