"""Matrices of 8-bit floating-point numbers (E4M3) with scales: one for all, one per output, or one per block.

Shape legend: N outputs, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from fractions import Fraction
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.formats.base import DTYPE_BITS, PLAIN, FileTensor, Format, Formats, Shape
from pipedec.formats.by_module import ModuleFormats, all_but, skipped_modules

SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")  # the last two are exponents of 2, 127 more than they stand for
_ACTIVATION_SCALES = (
    "input_scale", "input_scale_ub", "activation_scale", "output_scale", "input_zero_point", "k_scale", "v_scale",
)  # fmt: skip


@dataclass(frozen=True)
class Float8(Format):
    """A number of 8 bits per weight, which is multiplied by its scale.

    Attributes:
        scale: suffix of the tensor of the scales.
        block: outputs and inputs that share a scale; 0 inputs for all inputs. (0, 0): one scale for the matrix.
        scale_dtype: of the scales in the file.
    """

    scale: str = "weight_scale"
    block: tuple[int, int] = (0, 0)
    scale_dtype: str = "F32"

    @property
    def title(self) -> str:
        return "FP8"

    @property
    def step(self) -> int:
        return max(self.block[0], 1)

    @property
    def is_turnable(self) -> bool:
        return self.block[0] == self.block[1]

    @property
    def unused(self) -> tuple[str, ...]:
        return _ACTIVATION_SCALES

    def tensors(self, shape: Shape) -> dict[str, FileTensor]:
        """``weight`` [N, K], and the scales: [] or [1], [N, 1] or [N], or one per block, the last of which may be smaller."""
        dtypes = (self.scale_dtype, *(one for one in SCALE_DTYPES if one != self.scale_dtype))
        rows, columns = self.block
        if rows == 0:
            scales = FileTensor(dtypes, (), None, others=((1,), (1, 1)))
        else:
            grid = self.grid(shape)
            scales = FileTensor(dtypes, grid, 0, Fraction(1, rows), others=() if columns else (grid[:1],))
        return {"weight": FileTensor(("F8_E4M3",), shape), self.scale: scales}

    def grid(self, shape: Shape) -> Shape:
        """Scales that are held, by blocks of outputs and of inputs. One for the whole matrix is held for every output, so that
        matrices with different ones may be fused.
        """
        outputs, inputs = shape
        return -(-outputs // self.step), -(-inputs // (self.block[1] or inputs))

    def resolved(self, dtypes: Mapping[str, str]) -> Float8:
        found = dtypes.get(self.scale)
        return replace(self, scale_dtype=found) if found in SCALE_DTYPES else self

    def held_bytes(self, shape: Shape, element_bytes: int) -> int:
        del element_bytes
        return math.prod(shape) + math.prod(self.grid(shape)) * DTYPE_BITS[self.scale_dtype] // 8


@dataclass(frozen=True)
class Float8Formats(ModuleFormats):
    """Attributes:
    spellings: further formats, which the names of the scales in the file tell apart.
    tables: endings of the names of embeddings that are quantized, too.
    """

    spellings: Sequence[Float8] = ()
    tables: Sequence[str] = ()

    def stated(self, name: str) -> Format:
        module = name.removesuffix(".weight")
        return Float8() if any(module.endswith(one) for one in self.tables) else super().stated(name)

    def of(self, name: str, shape: Shape, known: Collection[str] = ()) -> Format:
        found = super().of(name, shape, known)
        if found is not PLAIN or len(shape) < 2 or self.stated(name) is PLAIN:
            return found
        prefix = name.removesuffix("weight")
        return next((one for one in self.spellings if prefix + one.scale in known), PLAIN)


def fp8(quantization: Mapping[str, Any]) -> Formats:
    """The formats of ``quant_method: fp8``: DeepSeek's and Qwen's blocks, or one scale per matrix. Raises UserError for other
    numbers than E4M3, and for blocks that are none.
    """
    numbers = quantization.get("fmt", "e4m3")
    if numbers != "e4m3":
        raise UserError(
            f"its weights are 8-bit floats {shortened(numbers)}, which are not supported: choose a checkpoint in e4m3"
        )
    scheme = quantization.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise UserError(f"quantization_config: activation_scheme must be dynamic or static, not {shortened(scheme)}")
    has_block = "weight_block_size" in quantization
    block = _block(quantization.get("weight_block_size", [128, 128]))
    skipped = skipped_modules(quantization, "modules_to_not_convert", "ignored_layers")
    spellings = Float8("weight_scale", block if has_block else (0, 0)), Float8("scale", block), Float8("qscale_weight", block)
    tables = skipped_modules(quantization, "modules_to_convert") if quantization.get("modules_to_convert") else ()
    rule = all_but(skipped, Float8("weight_scale_inv", block))
    return Float8Formats(rule, "FP8", (_note(scheme),), spellings, tables)


def fbgemm_fp8(quantization: Mapping[str, Any]) -> Formats:
    """The formats of ``quant_method: fbgemm_fp8``: a scale for each output."""
    skipped = skipped_modules(quantization, "modules_to_not_convert")
    return ModuleFormats(all_but(skipped, Float8("weight_scale", (1, 0))), "FBGEMM FP8", (_note("dynamic"),))


def modelopt(quantization: Mapping[str, Any]) -> Formats:
    """The formats of ``quant_method: modelopt`` in 8-bit floats. Raises UserError for its other algorithms, such as NVFP4."""
    algorithm = quantization.get("quant_algo")
    block = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0)}.get(algorithm) if isinstance(algorithm, str) else None
    if block is None:
        raise UserError(
            f"its weights are quantized by modelopt {shortened(algorithm)}, which is not supported: choose a checkpoint in FP8, "
            "or an unquantized one and --quantize int8 or int4"
        )
    if (cache := quantization.get("kv_cache_quant_algo") or quantization.get("kv_cache_scheme")) is not None:
        raise UserError(f"quantization_config: a quantized cache ({shortened(cache)}) is not supported: choose another one")
    skipped = tuple(translate(one) for one in skipped_modules(quantization, "ignore", "exclude_modules"))
    note = _note("static" if block == (0, 0) else "dynamic")
    return ModuleFormats(all_but(skipped, Float8("weight_scale", block)), "ModelOpt FP8", (note,))


def _note(scheme: str) -> str:
    return f"The checkpoint was made for activations in 8 bits ({scheme} scales); here they are computed in full precision."


def _block(stated: Any) -> tuple[int, int]:
    """Outputs and inputs that share a scale. Raises UserError if ``stated`` is not a block."""
    if stated is None:
        return 0, 0
    if not isinstance(stated, list | tuple) or len(stated) != 2 or not all(type(one) is int and one > 0 for one in stated):
        raise UserError(f"quantization_config: weight_block_size must be two positive integers or null, not {shortened(stated)}")
    return stated[0], stated[1]
