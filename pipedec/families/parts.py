"""The parts of which families make their layers, and what a layer is.

Families write the formula; ``model.decoder_layers`` gives the parts their weights. Knows no torch. Shapes as in
``model.stage_model``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from pipedec.families.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor


class Part:
    """A function of rows that may have weights. A family's parts only describe it; ``Decoder.bound`` makes them compute."""

    def tensors(self) -> dict[str, Shape]:
        """Names, relative to the layer, and shapes of its tensors."""
        return {}

    def __call__(self, rows: Tensor) -> Tensor:
        raise TypeError(f"{self} has no weights yet")


@dataclass(frozen=True)
class RMSNorm(Part):
    """Root mean square norm of the last dimension, computed in float32 for every dtype, as in transformers."""

    name: str
    size: int
    eps: float

    def tensors(self) -> dict[str, Shape]:
        return {f"{self.name}.weight": (self.size,)}

    def added(self, rows: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """norm(rows + residual), and rows + residual, in the memory of ``rows``; without a residual norm(rows), and rows."""
        raise TypeError(f"{self} has no weights yet")

    def added_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """residual + norm(rows), in the memory of ``rows``."""
        raise TypeError(f"{self} has no weights yet")

    def replace(self, rows: Tensor) -> None:
        """Let norm(rows) take the place of ``rows``."""
        raise TypeError(f"{self} has no weights yet")


@dataclass(frozen=True)
class Linear(Part):
    """Linear maps of the same inputs whose outputs follow each other: one matrix in memory, but a tensor each in a checkpoint."""

    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    has_bias: bool = False

    def tensors(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name, outputs in zip(self.names, self.outputs, strict=True):
            shapes[f"{name}.weight"] = outputs, self.inputs
            if self.has_bias:
                shapes[f"{name}.bias"] = (outputs,)
        return shapes


@dataclass(frozen=True)
class Activation(Part):
    """The function that transformers has under this name (``hidden_act``)."""

    name: str

    def gated(self, gate_up: Tensor) -> Tensor:
        """activation(gate) · up, [R, I], of rows [R, 2 · I] in which gate and up follow each other."""
        raise TypeError(f"{self} has no function yet")


class Heads(Protocol):
    """The attention of a layer over what the rows' requests have cached."""

    def split(self, qkv_RX: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values that follow each other in a row, as queries_keys [R, H + K, D] and values_RKD: views."""

    def attend(self, queries_keys: Tensor, values_RKD: Tensor, norms: tuple[RMSNorm, RMSNorm] | None = None) -> Tensor:
        """Rotate queries and keys by the rows' positions, cache keys and values, and attend: [R, H · D].

        ``norms``: of each head's queries and of its keys, before they are rotated; None without. ``queries_keys`` may be changed.
        """


class Decoder(ABC):
    """A layer. Its parts are its attributes."""

    @abstractmethod
    def forward(self, rows_RE: Tensor, residual_RE: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor | None]:
        """Rows and residual for the next layer, whose first norm adds them (see ``RMSNorm.added``): hidden_RE is their sum.

        May change the memory of ``rows_RE`` only if there is a residual, and that of ``residual_RE`` not at all.
        """

    def parts(self) -> dict[str, Part]:
        """By attribute."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Part)}

    def tensors(self) -> dict[str, Shape]:
        """Names, relative to the layer, and shapes of its tensors in a checkpoint."""
        return {name: shape for part in self.parts().values() for name, shape in part.tensors().items()}

    def bound(self, bind: Callable[[Part], Part]) -> Self:
        """The layer with other parts in place of its own, which compute."""
        layer = copy.copy(self)
        for name, part in self.parts().items():
            setattr(layer, name, bind(part))
        return layer
