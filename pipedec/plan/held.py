"""Weights as a rank holds them in memory: their bytes, and what a pass reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from pipedec.families import ExpertsShape
from pipedec.formats import Affine, Bnb4, Format, Ggml, Mxfp4, Plain, Rounded, WeightFormat
from pipedec.formats.base import Shape

# What torch's operations on a GPU read and write per weight while codes are unpacked, counted as they run.
_HALVES, _ZEROS, _TABLE = 5, 8, 4  # codes of 4 bits, zero points, and places in a table
_BLOCKS = {"Q8_0": 0, "Q4_0": 5, "Q4_1": 11, "Q4_K": 12, "Q5_0": 11, "Q5_1": 17, "Q5_K": 18, "Q6_K": 12, "MXFP4": _TABLE}


@dataclass(frozen=True)
class HeldWeights:
    """The weights of a part of a model.

    Attributes:
        parameters: numbers that they stand for.
        num_bytes: in memory.
        kernel_bytes: of those, of quantized matrices that a kernel for GPUs reads as they are.
        widening_bytes: memory traffic of a GPU that instead widens them for each product.
        widened_bytes: of a weight, at the most, while it is widened there; 0 if none is.
        experts: the routed experts among them, by their shape: all are in memory, but a pass reads those of its rows alone.
    """

    parameters: int = 0
    num_bytes: int = 0
    kernel_bytes: int = 0
    widening_bytes: int = 0
    widened_bytes: int = 0
    experts: tuple[tuple[ExpertsShape, HeldWeights], ...] = ()

    @property
    def dense(self) -> HeldWeights:
        """Those that every row computes with."""
        routed = [part for _, part in self.experts]
        return replace(
            self, parameters=self.parameters - sum(part.parameters for part in routed),
            num_bytes=self.num_bytes - sum(part.num_bytes for part in routed),
            kernel_bytes=self.kernel_bytes - sum(part.kernel_bytes for part in routed),
            widening_bytes=self.widening_bytes - sum(part.widening_bytes for part in routed), experts=(),
        )  # fmt: skip

    def read_bytes(self, on_gpu: bool) -> int:
        """Memory traffic of one pass in which all are read. A GPU without kernels widens matrices in its memory, where each
        operation reads and writes them again. A processor widens them in its cache.
        """
        return self.num_bytes + (self.widening_bytes if on_gpu else 0)


@lru_cache(maxsize=4096)
def held(format: Format, shape: Shape, weights: WeightFormat) -> HeldWeights:
    """A tensor of the model. Raises UserError if its sizes do not suit its format."""
    parameters, num_bytes = prod(shape), format.held_bytes(shape, weights.element_bytes)
    if isinstance(format, Plain):
        return HeldWeights(parameters, num_bytes)
    if weights.kernels:
        return HeldWeights(parameters, num_bytes, kernel_bytes=num_bytes)
    traffic, most = _widening(format, weights.element_bytes)
    return HeldWeights(parameters, num_bytes, widening_bytes=parameters * traffic, widened_bytes=most)


def together(parts: Sequence[HeldWeights]) -> HeldWeights:
    return HeldWeights(
        sum(part.parameters for part in parts),
        sum(part.num_bytes for part in parts),
        sum(part.kernel_bytes for part in parts),
        sum(part.widening_bytes for part in parts),
        max((part.widened_bytes for part in parts), default=0),
        _by_shape([one for part in parts for one in part.experts]),
    )


def as_experts(shape: ExpertsShape, weights: HeldWeights) -> HeldWeights:
    """The weights of all routed experts of a layer."""
    return replace(weights, experts=((shape, weights),))


def _by_shape(experts: Sequence[tuple[ExpertsShape, HeldWeights]]) -> tuple[tuple[ExpertsShape, HeldWeights], ...]:
    """Experts of the same shape together, of all layers."""
    shapes = dict.fromkeys(shape for shape, _ in experts)
    return tuple((shape, together([part for other, part in experts if other == shape])) for shape in shapes)


def _widening(format: Format, element_bytes: int) -> tuple[int, int]:
    """Bytes that a GPU reads and writes for each weight that it widens, beside those in memory, and the most that one takes
    meanwhile. Weights that were rounded as they were read are widened to the numbers of the product, all others to float32 first.
    """
    if isinstance(format, Rounded):
        return (2 * element_bytes, element_bytes) if format.bits == 8 else (4 + 4 * element_bytes, 1 + element_bytes)
    written_and_scaled, converted = 4 + 8, 4 + element_bytes if element_bytes < 4 else 0
    return _unpacking(format) + written_and_scaled + converted + element_bytes, 8


def _unpacking(format: Format) -> int:
    if isinstance(format, Affine):
        return _HALVES * (format.bits == 4) + _ZEROS * (format.zeros is not None)
    if isinstance(format, Ggml):
        return _BLOCKS[format.type]
    return _TABLE if isinstance(format, Mxfp4 | Bnb4) else 0
