"""The layers of a stage, with the embedding on the first stage and the head on the last.

``DecoderLayers`` are made of pipedec's own parts. Shapes as in ``stage_model``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.families import LayerShape, ModelConfig, Shape
from pipedec.formats import ROUNDED, Format
from pipedec.model.attention import LayersShape, Rows
from pipedec.model.formats import Widens, as_stored, stacked
from pipedec.model.matrices import Matrix, Products
from pipedec.model.weights import Checkpoint
from pipedec.tree import is_mask

Progress = Callable[[int, int], None]  # called with (tensors read, tensors in total) after each tensor


@dataclass(frozen=True)
class Storage:
    """Where and how weights are kept.

    Attributes:
        dtype: of activations, caches, and weights that are not quantized.
        quantize: how plain matrices of the layers are kept: ``int8`` or ``int4``; None for ``dtype``. With either, embedding and
            head take 8 bits; norms and biases keep ``dtype``.
        widens: whether matrices of a format with fewer bits are kept in ``dtype``, too.
    """

    dtype: torch.dtype
    device: torch.device
    quantize: str | None = None
    widens: Widens = as_stored

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def matrix(self, formats: Sequence[Format], outputs: Sequence[int], inputs: int) -> Matrix:
        """Matrices one below the other, without values, which lie in the checkpoint in these formats. Raises UserError if the
        sizes do not allow a format, or ``quantize``.
        """
        if self.quantize is not None:
            formats = [ROUNDED[self.quantize]] * len(formats)
        return stacked(formats, outputs, inputs, self.dtype, self.device, self.widens)

    def table(self, format: Format, outputs: int, inputs: int) -> Matrix:
        """An embedding or a head without values."""
        format = format if self.quantize is None else ROUNDED["int8"]
        return stacked([format], [outputs], inputs, self.dtype, self.device, self.widens)


class StageLayers(ABC):
    """The layers of one stage; their weights are not initialized until they are read.

    Attributes:
        config: of the whole model.
        layers: which layers of it.
        is_first, is_last: whether the stage holds the embedding; the final norm and the head.
        shape: of the layers' attention.
        products: the products with their matrices.
        routed: the routed experts of those of its layers that have any.
        experts_read: int64 [] on the device, experts that the rows of the last forward passed through, added up over layers; None
            if none was counted.
        mask_embeddings: [M, E], embeddings of masks (BiTA); None without.
    """

    def __init__(self, config: ModelConfig, layers: range, storage: Storage) -> None:
        self.config, self.layers, self.storage = config, layers, storage
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_hidden_layers
        own = enumerate(config.layers[layers.start : layers.stop])
        attention = {number: layer for number, layer in own if isinstance(layer, LayerShape)}
        self.shape = LayersShape(attention, config.hidden_size, storage.dtype)
        self.products = Products()
        self.routed = tuple(one for one in config.experts[layers.start : layers.stop] if one is not None)
        self.experts_read: Tensor | None = None
        self.mask_embeddings: Tensor | None = None

    @property
    def can_capture(self) -> bool:
        """Whether a forward reads no tensor's values on the host."""
        return True

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes; a tied head that shares the embedding counts once, unless it is packed."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors()}.values())

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All weights, as they are kept in memory; one may occur twice."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Read the weights, one tensor at a time, quantized as they are read. Raises UserError for an incomplete or damaged
        checkpoint.
        """

    @abstractmethod
    def forward(self, inputs: Tensor, rows: Rows) -> Tensor:
        """hidden_RE after all layers, whose keys and values are written to the pool. ``inputs`` as of ``StageModel.forward``."""

    @abstractmethod
    def normed(self, hidden_RE: Tensor) -> Tensor:
        """After the final norm, [R, E], on the last stage."""

    @abstractmethod
    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Final norm and head, [R, V], on the last stage."""

    def embedded(self, token_ids_R: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Embeddings of tokens by ``embed``, and of masks, whose ids are negative: [R, E]."""
        if self.mask_embeddings is None:
            return embed(token_ids_R)
        masks_RE = functional.embedding((-1 - token_ids_R).clamp(min=0), self.mask_embeddings)
        return torch.where(is_mask(token_ids_R)[:, None], masks_RE, embed(token_ids_R.clamp(min=0)))

    def table(self, checkpoint: Checkpoint, tensors: Mapping[str, Shape]) -> Matrix:
        """Memory for the embedding or the head, of which ``tensors`` has the ``weight``."""
        name, shape = next((name, shape) for name, shape in tensors.items() if len(shape) == 2)
        return self.storage.table(checkpoint.format_of(self.config, name, shape), *shape)
