"""Matrices of 4-bit numbers that are places in a table of 16 values: MXFP4, and the NF4 and FP4 of bitsandbytes.

Shape legend: N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.formats.base import FileTensor, Format, Formats, Shape
from pipedec.formats.by_module import ModuleFormats, all_but, skipped_modules

MXFP4_GROUP = 32
NESTED_SCALES = 256  # scales in 8 bits that share a scale
BNB_GROUP = 64


@dataclass(frozen=True)
class Mxfp4(Format):
    """4-bit floats (E2M1), 32 of which share an exponent of 2."""

    @property
    def title(self) -> str:
        return "MXFP4"

    def tensors(self, shape: Shape) -> dict[str, FileTensor]:
        """``weight_blocks`` [N, K / 32, 16] and ``weight_scales`` [N, K / 32]. Raises UserError unless 32 divides K."""
        outputs, inputs = shape
        groups = whole_groups("MXFP4", inputs, MXFP4_GROUP)
        return {
            "weight_blocks": FileTensor(("U8",), (outputs, groups, MXFP4_GROUP // 2)),
            "weight_scales": FileTensor(("U8", "F8_E8M0"), (outputs, groups)),
        }


@dataclass(frozen=True)
class Bnb4(Format):
    """4 bits of bitsandbytes, row after row in one vector, 64 of which share a scale.

    Attributes:
        table: ``nf4`` or ``fp4``.
        is_nested: whether scales are in 8 bits, 256 of which share a scale.
    """

    table: str = "nf4"
    is_nested: bool = False

    @property
    def title(self) -> str:
        return f"bitsandbytes {self.table}"

    @property
    def state(self) -> str:
        """Suffix of the description of the numbers, JSON."""
        return f"weight.quant_state.bitsandbytes__{self.table}"

    @property
    def unused(self) -> tuple[str, ...]:
        return ("weight.quant_map",)

    def tensors(self, shape: Shape) -> dict[str, FileTensor]:
        """``weight`` [N · K / 2, 1], ``weight.absmax`` [N · G], and its own scales. Raises UserError unless 64 divides K."""
        outputs, inputs = shape
        groups = whole_groups(self.title, inputs, BNB_GROUP)
        found = {
            "weight": FileTensor(("U8",), (outputs * inputs // 2, 1), 0, Fraction(inputs, 2)),
            "weight.absmax": FileTensor(("U8" if self.is_nested else "F32",), (outputs * groups,), 0, Fraction(groups)),
            self.state: FileTensor(("U8",), (-1,), None),
        }
        if self.is_nested:
            size = -(-outputs * groups // NESTED_SCALES)
            found["weight.nested_absmax"] = FileTensor(("F32",), (size,), 0, Fraction(groups, NESTED_SCALES))
            found["weight.nested_quant_map"] = FileTensor(("F32",), (256,), None)
        return found

    def resolved(self, dtypes: Mapping[str, str]) -> Bnb4:
        return replace(self, is_nested=dtypes["weight.absmax"] == "U8") if "weight.absmax" in dtypes else self

    def nested_scales(self, inputs: int) -> int:
        """Scales of scales that an output may need."""
        groups = inputs // BNB_GROUP
        return 1 + -(-(groups - math.gcd(groups, NESTED_SCALES)) // NESTED_SCALES)

    def held_bytes(self, shape: Shape, element_bytes: int) -> int:
        """Nested scales are held for each output, with their place and offset."""
        del element_bytes
        outputs, inputs = shape
        groups = inputs // BNB_GROUP
        if not self.is_nested:
            return outputs * (inputs // 2 + 4 * groups)
        return outputs * (inputs // 2 + groups + 4 * self.nested_scales(inputs) + 4 + 1) + 4 * 256


def whole_groups(title: str, inputs: int, group: int) -> int:
    """Groups of inputs. Raises UserError if the last one is not whole."""
    if inputs % group:
        raise UserError(f"{title} takes matrices whose inputs are a multiple of {group}, not {inputs}")
    return inputs // group


def mxfp4(quantization: Mapping[str, Any]) -> Formats:
    """The formats of ``quant_method: mxfp4``."""
    return ModuleFormats(all_but(skipped_modules(quantization, "modules_to_not_convert"), Mxfp4()), "MXFP4")


def bitsandbytes(quantization: Mapping[str, Any]) -> Formats:
    """The formats of ``quant_method: bitsandbytes`` in 4 bits. Raises UserError for 8 bits, and other tables than NF4 and FP4."""
    if not _flag(quantization, "load_in_4bit"):
        bits = "in 8 bits (load_in_8bit)" if _flag(quantization, "load_in_8bit") else "without load_in_4bit"
        raise UserError(
            f"its weights are quantized by bitsandbytes {bits}, which is not supported: choose a checkpoint in 4 bits (nf4), or "
            "an unquantized one and --quantize int8"
        )
    table = quantization.get("bnb_4bit_quant_type", "fp4")
    if table not in ("nf4", "fp4"):
        raise UserError(f"quantization_config: bnb_4bit_quant_type must be nf4 or fp4, not {shortened(table)}")
    storage = quantization.get("bnb_4bit_quant_storage") or "uint8"
    if storage != "uint8":
        raise UserError(f"quantization_config: bnb_4bit_quant_storage must be uint8, not {shortened(storage)}")
    skipped = skipped_modules(quantization, "llm_int8_skip_modules")
    format = Bnb4(table, _flag(quantization, "bnb_4bit_use_double_quant"))
    return ModuleFormats(all_but(skipped, format), format.title)


def _flag(quantization: Mapping[str, Any], key: str) -> bool:
    return quantization.get(key, quantization.get(f"_{key}")) is True
