"""How weights are stored: in a data type, or quantized; and the bytes that they take and that a pass reads."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BITS = {"int8": 8, "int4": 4}
QUANTIZED_GROUP = 32  # inputs of an output that share a scale and the weight of 0 in 4 bits


@dataclass(frozen=True)
class WeightFormat:
    """How a model's weights, activations and caches are stored.

    Attributes:
        dtype: of activations, caches, and weights that are not quantized.
        quantize: ``int8`` or ``int4`` for the matrices of the layers, embedding and head then take 8 bits; None for ``dtype``.
    """

    dtype: str
    quantize: str | None = None

    def __str__(self) -> str:
        return self.dtype if self.quantize is None else f"{self.dtype}, weights in {self.quantize}"

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> float:
        """Bytes per weight of a layer, with its share of scales and zero points, but without scales of 8 bits, one per output."""
        if self.quantize is None:
            return self.element_bytes
        groups = 2 * self.element_bytes / QUANTIZED_GROUP if self.quantize == "int4" else 0
        return QUANTIZED_BITS[self.quantize] / 8 + groups

    @property
    def table_bytes(self) -> float:
        """Bytes per weight of the embedding or the head."""
        return self.element_bytes if self.quantize is None else 1

    def read_bytes(self, layer_weights: int, head_weights: int, on_gpu: bool) -> float:
        """Memory traffic of one pass. On a GPU weights are widened to ``dtype`` in its memory, written there and read again,
        unless a kernel reads them as they are. A processor widens them in its cache."""
        widened = 2 * self.element_bytes if self.quantize is not None and on_gpu else 0
        layers = self.layer_bytes + (0 if self.widens_in_kernel else widened)
        return layer_weights * layers + head_weights * (self.table_bytes + widened)

    @property
    def widens_in_kernel(self) -> bool:
        """Whether torch's kernel for a GPU reads the weights of layers as they are."""
        return self.quantize == "int4" and self.dtype == "bfloat16"
