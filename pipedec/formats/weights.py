"""The numbers that a user chooses for a model: the data type, and whether weights are rounded."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class WeightFormat:
    """The number formats of a model's weights, activations and caches in memory.

    Attributes:
        dtype: of activations, caches, and weights that are not quantized.
        quantize: ``int8`` or ``int4`` for the matrices of the layers, embedding and head then take 8 bits; None for those of the
            checkpoint.
        kernels: whether GPUs compute with quantized matrices as they are stored; without, they widen them for each product.
    """

    dtype: str
    quantize: str | None = None
    kernels: bool = True

    def __str__(self) -> str:
        return self.dtype if self.quantize is None else f"{self.dtype}, weights in {self.quantize}"

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]
