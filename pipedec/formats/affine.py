"""Integers of 4 or 8 bits with a scale, and perhaps a zero point, for each group of inputs of an output: ``(q − z) · s``.

GPTQ, AWQ, AutoRound and compressed-tensors differ only in where the file has which bits, which ``Affine`` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from pipedec.core.errors import UserError
from pipedec.formats.base import DTYPE_BITS, KERNEL_GROUPS, FileTensor, Format, Shape

SCALE_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Integers:
    """A tensor of unsigned integers, of which there is one row per output and one column per input or group of inputs.

    Attributes:
        suffix: of its name.
        along: whether 32 bits of the file hold numbers of consecutive ``outputs`` or ``columns``, lowest bits first; ``none`` for
            one signed byte per number.
        is_transposed: whether the outputs are the second axis of the file.
        order: the field of 32 bits that holds each of their numbers in turn, if those do not lie lowest first.
        added: to each number of the file, modulo 2^bits.
    """

    suffix: str
    along: Literal["outputs", "columns", "none"] = "columns"
    is_transposed: bool = False
    order: tuple[int, ...] = ()
    added: int = 0

    def tensor(self, outputs: int, columns: int, bits: int) -> FileTensor:
        """The tensor of the file."""
        if self.along == "none":
            return FileTensor(("I8",), (outputs, columns))
        fields = 32 // bits
        held_outputs, held_columns = outputs, columns
        if self.along == "outputs":
            held_outputs = -(-outputs // fields)
        else:
            held_columns = -(-columns // fields)
        shape = (held_columns, held_outputs) if self.is_transposed else (held_outputs, held_columns)
        per_output = Fraction(1, fields) if self.along == "outputs" else Fraction(1)
        return FileTensor(("I32",), shape, int(self.is_transposed), per_output)


@dataclass(frozen=True)
class Scales:
    """One for each group of inputs of an output.

    Attributes:
        suffix: of the name.
        is_transposed: whether the outputs are the second axis of the file.
        is_single: whether there is a single one for the matrix.
        dtype: as safetensors names it.
    """

    suffix: str
    is_transposed: bool = False
    is_single: bool = False
    dtype: str | None = None

    def tensor(self, outputs: int, groups: int) -> FileTensor:
        dtypes = SCALE_DTYPES if self.dtype is None else (self.dtype,)
        if self.is_single:
            return FileTensor(dtypes, (1,), None)
        shape = (groups, outputs) if self.is_transposed else (outputs, groups)
        return FileTensor(dtypes, shape, int(self.is_transposed))


@dataclass(frozen=True)
class Affine(Format):
    """Integers of 4 or 8 bits: the weight of q is ``(q − z) · s``.

    Attributes:
        method: of quantization, as users know it.
        bits: of q, 4 or 8.
        group: inputs that share s and z; 0 for all inputs of an output.
        codes: q.
        scales: s.
        zeros: z; None for 8, or 128 of 8 bits, throughout.
        same_zeros: zero points of a symmetric matrix in the file: all of them are 8, or 7 where 1 is subtracted (128, 127).
        groups: suffix of a tensor with the group of each input.
        is_ordered: whether those groups are others than ``input // group``, so that no matrices are fused.
        left_out: suffixes of tensors that are not used.
    """

    method: str
    bits: int
    group: int
    codes: Integers
    scales: Scales
    zeros: Integers | None = None
    same_zeros: Integers | None = None
    groups: str | None = None
    is_ordered: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.method}, {self.bits} bits" + (f" in groups of {self.group}" if self.group else "")

    @property
    def unused(self) -> tuple[str, ...]:
        return self.left_out

    @property
    def is_fusable(self) -> bool:
        return not self.is_ordered

    def num_groups(self, inputs: int) -> int:
        """Groups of the inputs of an output; the last one may be smaller."""
        return -(-inputs // self.group) if self.group else 1

    def tensors(self, shape: Shape) -> dict[str, FileTensor]:
        outputs, inputs = shape
        fields, packed = 32 // self.bits, [one for one in (self.codes, self.zeros) if one is not None]
        if self.codes.is_transposed and self.codes.along == "columns" and inputs % fields:
            raise UserError(f"{self.method} takes matrices whose inputs are a multiple of {fields}, not {inputs}")
        if any(one.is_transposed and one.along == "outputs" for one in packed) and outputs % fields:
            raise UserError(f"{self.method} takes matrices whose outputs are a multiple of {fields}, not {outputs}")
        if self.bits == 4 and inputs % 2:
            raise UserError(f"{self.method} takes matrices whose inputs are even, not {inputs}")
        groups = self.num_groups(inputs)
        found = {
            self.codes.suffix: self.codes.tensor(outputs, inputs, self.bits),
            self.scales.suffix: self.scales.tensor(outputs, groups),
        }
        if (zeros := self.zeros or self.same_zeros) is not None:
            found[zeros.suffix] = replace(zeros.tensor(outputs, groups, self.bits), is_optional=self.zeros is None)
        if self.groups is not None:
            found[self.groups] = FileTensor(("I32", "I64"), (inputs,), None, is_optional=not self.is_ordered)
        return found

    def resolved(self, dtypes: Mapping[str, str]) -> Affine:
        dtype = dtypes.get(self.scales.suffix)
        return self if dtype not in SCALE_DTYPES else replace(self, scales=replace(self.scales, dtype=dtype))

    def has_kernel(self, dtype: str) -> bool:
        """4 bits in some groups, and 8 bits with a scale for each output."""
        if dtype != "bfloat16" or self.is_ordered:
            return False
        if self.bits == 4:
            return self.group in KERNEL_GROUPS
        return self.group == 0 and self.zeros is None

    def held_bytes(self, shape: Shape, element_bytes: int) -> int:
        outputs, inputs = shape
        per_group = DTYPE_BITS[self.scales.dtype or SCALE_DTYPES[0]] // 8 + (self.zeros is not None)
        if self.bits == 4 and self.group in KERNEL_GROUPS and element_bytes == 2 and not self.is_ordered:
            per_group = 4  # as torch's kernel has them
        order = 4 * inputs if self.is_ordered else 0
        return outputs * inputs * self.bits // 8 + outputs * self.num_groups(inputs) * per_group + order
