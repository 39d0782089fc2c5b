"""Matrices of GGUF files: blocks of a row's inputs, each with its scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipedec.formats.base import ALL_PLAIN, PLAIN, FileTensor, Format, Formats, Shape
from pipedec.gguf import BLOCKS, TensorIndex

_KERNEL_TYPES = ("Q4_0", "Q4_1", "Q4_K")  # which torch's kernel for 4 bits can compute with
_KERNEL_BITS = 5  # and then takes, with two numbers of 16 bits for 32 inputs


@dataclass(frozen=True)
class Ggml(Format):
    """Blocks of a type of llama.cpp.

    Attributes:
        type: its name, one of ``gguf.BLOCKS``.
    """

    type: str

    @property
    def title(self) -> str:
        return self.type

    @property
    def block_inputs(self) -> int:
        return BLOCKS[self.type][0]

    @property
    def block_bytes(self) -> int:
        return BLOCKS[self.type][1]

    def has_kernel(self, dtype: str) -> bool:
        """Whether it is a group of 4 bits with a scale and the weight of 0, which torch's kernel reads."""
        return self.type in _KERNEL_TYPES and dtype == "bfloat16"

    def tensors(self, shape: Shape) -> dict[str, FileTensor]:
        """The matrix under its own name, by the shape of its values."""
        return {"weight": FileTensor((self.type,), shape)}

    def held_bytes(self, shape: Shape, element_bytes: int) -> int:
        """The bytes of the file. In 16 bits at most what torch's kernel takes, if there is one for the type."""
        values = math.prod(shape)
        if self.type in _KERNEL_TYPES and element_bytes == 2:
            return values * _KERNEL_BITS // 8
        return values // self.block_inputs * self.block_bytes


class GgufFormats(Formats):
    """The formats of a GGUF file's tensors.

    Args:
        types: of the tensors that are blocks, by name.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        self._formats = {name: Ggml(kind) for name, kind in types.items()}
        self.title = f"GGUF: {', '.join(sorted(set(types.values())))}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GgufFormats) and self._formats == other._formats

    def __hash__(self) -> int:
        return hash(self.title)

    def stated(self, name: str) -> Format:
        return self._formats.get(name, PLAIN)


def indexed_formats(index: TensorIndex) -> Formats:
    """The formats of a GGUF file's tensors."""
    types = {name: place.read_type for name, place in index.tensors.items() if place.read_type in BLOCKS}
    return GgufFormats(types) if types else ALL_PLAIN
