"""Weights as a rank holds them in memory: their bytes, and what a pass reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from pipedec.formats import Format, Plain, WeightFormat
from pipedec.formats.base import Shape


@dataclass(frozen=True)
class HeldWeights:
    """The weights of a part of a model.

    Attributes:
        parameters: numbers that they stand for.
        num_bytes: in memory.
        kernel_bytes: of those, of quantized matrices that a kernel for GPUs reads as they are.
        widened: parameters of the quantized matrices that a GPU widens for each product.
    """

    parameters: int = 0
    num_bytes: int = 0
    kernel_bytes: int = 0
    widened: int = 0

    def read_bytes(self, element_bytes: int, on_gpu: bool) -> int:
        """Memory traffic of one pass. A GPU without a kernel widens matrices in its memory, where they are written and read again
        in numbers of ``element_bytes``. A processor widens them in its cache.
        """
        return self.num_bytes + (2 * element_bytes * self.widened if on_gpu else 0)


@lru_cache(maxsize=4096)
def held(format: Format, shape: Shape, weights: WeightFormat) -> HeldWeights:
    """A tensor of the model. Raises UserError if its sizes do not suit its format."""
    parameters, num_bytes = prod(shape), format.held_bytes(shape, weights.element_bytes)
    if isinstance(format, Plain):
        return HeldWeights(parameters, num_bytes)
    if format.has_kernel(weights.dtype):
        return HeldWeights(parameters, num_bytes, kernel_bytes=num_bytes)
    return HeldWeights(parameters, num_bytes, widened=parameters)


def together(parts: Sequence[HeldWeights]) -> HeldWeights:
    return HeldWeights(
        sum(part.parameters for part in parts),
        sum(part.num_bytes for part in parts),
        sum(part.kernel_bytes for part in parts),
        sum(part.widened for part in parts),
    )
