"""The storage of a model's tensors in a checkpoint: as they are, or as quantized numbers with scales.

A format is plain data: it names the tensors in the file and their shapes, and says how numbers are packed. ``model.formats``
reads them and computes with them. Knows no torch.

Shape legend: N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

Shape = tuple[int, ...]

WIDENED_VALUES = 1 << 26  # weights that a GPU widens at once: with fewer, products are too narrow to fill it
KERNEL_GROUPS = (32, 64, 128, 256)  # inputs that may share a scale in torch's kernels for 4 bits
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8,
    "F8_E5M2": 8, "F8_E8M0": 8,
}  # fmt: skip


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file that is a matrix, or holds a part of what makes one.

    Attributes:
        dtypes: those that it may have, as safetensors or GGUF names them.
        shape: in the file; a length of -1 stands for any.
        axis: along which the outputs of the matrix follow each other; None if the tensor belongs to all outputs.
        per_output: indices along ``axis`` for each output, as 1/8 where a number holds eight outputs.
        is_optional: whether a checkpoint may lack it.
        others: further shapes that it may have, with the same numbers in the same order.
    """

    dtypes: tuple[str, ...]
    shape: Shape
    axis: int | None = 0
    per_output: Fraction = Fraction(1)
    is_optional: bool = False
    others: tuple[Shape, ...] = ()

    def suits(self, shape: Shape) -> bool:
        """Whether it may have this shape."""
        fits = len(shape) == len(self.shape) and all(want in (-1, size) for want, size in zip(self.shape, shape, strict=True))
        return fits or shape in self.others

    def stacked(self, count: int) -> FileTensor:
        """So many such tensors in one, whose first dimension counts them."""
        others = tuple((count, *shape) for shape in self.others)
        return replace(self, shape=(count, *self.shape), axis=None if self.axis is None else self.axis + 1, others=others)

    def places(self, outputs: slice) -> tuple[slice, ...]:
        """Where the part of some outputs is. Raises ValueError if they share an index with others."""
        if self.axis is None:
            return ()
        first, last = outputs.start * self.per_output, outputs.stop * self.per_output
        if first.denominator != 1:
            raise ValueError(f"output {outputs.start} does not begin at an index")
        return (*(slice(None),) * self.axis, slice(int(first), math.ceil(last)))


class Format(ABC):
    """The storage of a matrix [N, K] in a file. Matrices of equal formats may be fused.

    Attributes:
        title: as users know it.
        step: outputs that cannot be separated: matrices are read, cut and fused at multiples of it.
    """

    @property
    @abstractmethod
    def title(self) -> str: ...

    @property
    def step(self) -> int:
        return 1

    @abstractmethod
    def tensors(self, shape: Shape) -> dict[str, FileTensor]:
        """The tensors of the file, by the suffix in place of ``weight``. Raises UserError if ``shape`` does not suit."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Suffixes of further tensors that belong to the matrix, which is computed without them."""
        return ()

    @property
    def is_fusable(self) -> bool:
        """Whether matrices of equal formats can be one."""
        return True

    @property
    def is_turnable(self) -> bool:
        """Whether the tensors of a transposed matrix are those of the matrix, each transposed."""
        return False

    def resolved(self, dtypes: Mapping[str, str]) -> Format:
        """The format of a matrix that is here: ``dtypes`` are those of its tensors, by suffix. Raises UserError if the tensors do
        not suit.
        """
        del dtypes
        return self

    def has_kernel(self, dtype: str) -> bool:
        """Whether torch on a processor multiplies rows of this dtype by the matrix as it lies in memory, without widening it."""
        del dtype
        return False

    def held_bytes(self, shape: Shape, element_bytes: int) -> int:
        """Memory that the matrix takes; ``element_bytes``: of a number of the model's dtype."""
        del element_bytes
        return sum(stored_bytes(tensor) for tensor in self.tensors(shape).values() if not tensor.is_optional)


@dataclass(frozen=True)
class Plain(Format):
    """Floating-point numbers, one per weight; also every tensor that is no matrix."""

    @property
    def title(self) -> str:
        return "plain"

    @property
    def is_turnable(self) -> bool:
        return True

    def tensors(self, shape: Shape) -> dict[str, FileTensor]:
        return {"weight": FileTensor(FLOATS, shape, None if not shape else 0)}

    def held_bytes(self, shape: Shape, element_bytes: int) -> int:
        return math.prod(shape) * element_bytes


PLAIN = Plain()


def stored_bytes(tensor: FileTensor) -> int:
    """Size in the file, with the first of its possible dtypes."""
    return math.prod(tensor.shape) * DTYPE_BITS[tensor.dtypes[0]] // 8


class Formats(ABC):
    """The formats of a checkpoint's tensors, by their names in the model: ``….weight`` for a matrix."""

    title = "plain"

    @property
    def notes(self) -> tuple[str, ...]:
        """Whole sentences for users about computing with them, where that may surprise."""
        return ()

    @abstractmethod
    def stated(self, name: str) -> Format:
        """The format that the checkpoint's description gives to the matrix of a linear map."""

    def of(self, name: str, shape: Shape, known: Collection[str] = ()) -> Format:
        """The format of a tensor. ``known``: the names of the checkpoint's tensors, as far as they are known: a matrix that is
        there as it is, is plain, even if the description has it otherwise.
        """
        if not is_stack(name, shape) and not (len(shape) == 2 and name.endswith(".weight")):
            return PLAIN
        found = self.stated(name)
        needed = [one for one, tensor in file_names(name, found, shape).items() if not tensor.is_optional]
        return PLAIN if name in known and not all(one in known for one in needed) else found


class AllPlain(Formats):
    def stated(self, name: str) -> Format:
        del name
        return PLAIN


ALL_PLAIN = AllPlain()


def is_stack(name: str, shape: Shape) -> bool:
    """Whether a tensor of the model is a stack of matrices [E, N, K], one for each expert of a layer."""
    return len(shape) == 3 and "experts" in name.split(".")


def matrix_shape(name: str, shape: Shape) -> Shape:
    """The shape of a tensor of the model in memory: of a stack, that of its matrices one below the other."""
    return (shape[0] * shape[1], shape[2]) if is_stack(name, shape) else shape


def file_names(name: str, format: Format, shape: Shape) -> dict[str, FileTensor]:
    """The tensors of the file that make one of the model, by full names. Those of a stack have its experts as their first
    dimension.
    """
    stacked = is_stack(name, shape)
    tensors = format.tensors(shape[1:] if stacked else shape)
    return {full_name(name, suffix): one.stacked(shape[0]) if stacked else one for suffix, one in tensors.items()}


def full_name(name: str, suffix: str) -> str:
    """The name of a tensor of the file, of those that make ``name`` (see ``Format.tensors``)."""
    return name.removesuffix("weight") + suffix if name.endswith(".weight") else name + suffix.removeprefix("weight")


def own_suffix(name: str, full: str) -> str:
    """The reverse of ``full_name``."""
    return full.removeprefix(name.removesuffix("weight")) if name.endswith(".weight") else "weight" + full.removeprefix(name)


@dataclass(frozen=True)
class Rounded(Format):
    """Plain in the file, rounded to 8 or 4 bits while it is read.

    Attributes:
        bits: 8, with a scale for each output, or 4, with a scale and the weight of 0 for each ``group`` inputs of an output.
    """

    bits: int
    group: int = 32

    @property
    def title(self) -> str:
        return f"int{self.bits}"

    @property
    def is_turnable(self) -> bool:
        return True

    def tensors(self, shape: Shape) -> dict[str, FileTensor]:
        return PLAIN.tensors(shape)

    def held_bytes(self, shape: Shape, element_bytes: int) -> int:
        outputs, inputs = shape
        scales = outputs * element_bytes * (1 if self.bits == 8 else 2 * inputs // self.group)
        return outputs * inputs * self.bits // 8 + scales


ROUNDED = {"int8": Rounded(8), "int4": Rounded(4)}


class AllRounded(Formats):
    """Every matrix rounded while it is read: those of layers as ``quantize`` names it, those of embedding and head to 8 bits.

    Args:
        tables: the names of embedding and head.
        plain: the names of matrices that are not rounded.
    """

    def __init__(self, quantize: str, tables: Collection[str], plain: Collection[str] = ()) -> None:
        self.title, self._tables, self._plain = quantize, tables, plain

    def stated(self, name: str) -> Format:
        return PLAIN if name in self._plain else ROUNDED["int8" if name in self._tables else self.title]
