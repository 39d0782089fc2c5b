"""Layers of pipedec's own parts: a family's formula, with weights that are fused, packed and quantized as they are read.

Shapes as in ``stage_model``; X outputs of the fused projections of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.core.errors import UserError
from pipedec.families import Activation, Decoder, DecoderConfig, LayerShape, Linear, Part, RMSNorm
from pipedec.model.attention import Rows
from pipedec.model.matrices import Int8Matrix, Matrix, Products, prepared
from pipedec.model.rotary import CosSin, Rotary, rotate
from pipedec.model.stage_layers import Progress, StageLayers, Storage, looked_up
from pipedec.model.weights import Checkpoint


class DecoderLayers(StageLayers):
    """See ``StageLayers``. The layers are made when they are read."""

    def __init__(self, config: DecoderConfig, layers: range, storage: Storage) -> None:
        super().__init__(config, layers, storage)
        self._config = config
        self._rotary = Rotary(config, storage.dtype, storage.device)
        self._decoders: list[Decoder] = []
        table = config.vocab_size, config.hidden_size
        self._embedding_VE = storage.table(*table) if self.is_first else None
        self._norm = _BoundNorm(config.final_norm, storage) if self.is_last else None
        self._head_VE: Matrix | None = storage.table(*table) if self.is_last else None

    def forward(self, inputs: Tensor, rows: Rows) -> Tensor:
        embedding_VE = self._embedding_VE
        hidden_RE = inputs if embedding_VE is None else self.embedded(inputs, partial(looked_up, embedding_VE))
        cos_sin = self._rotary.cos_sin(rows.positions, rows.lengths)
        for index, decoder in enumerate(self._decoders):
            hidden_RE = decoder.forward(hidden_RE, RotaryHeads(self.shape.layers[index], index, cos_sin, rows))
        return hidden_RE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        assert self._norm is not None and self._head_VE is not None
        return self.products(self._norm(hidden_RE), self._head_VE)

    def read(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """A layer's matrices are packed as soon as they are complete, and the next ones take the memory that this leaves."""
        config, numbers = self._config, count(1)
        head_tensors = config.head_tensors(checkpoint.names)
        if self.is_first and self.is_last and head_tensors.keys() == config.embedding_tensors().keys():
            self._head_VE = self._embedding_VE
        edges: dict[str, Matrix] = {}
        for tensors, table in ((config.embedding_tensors(), self._embedding_VE), (head_tensors, self._head_VE)):
            edges |= {} if table is None else dict.fromkeys(tensors, table)
        if self._norm is not None:
            edges |= self._norm.targets("")
        total = len(edges) + sum(len(config.layer_tensors(layer)) for layer in self.layers)
        read = partial(checkpoint.read_into, progress=lambda: progress(next(numbers), total))
        read(edges)
        for layer in self.layers:
            decoder = config.decoder(layer).bound(partial(_bound, storage=self.storage, products=self.products))
            parts = _weighted(decoder)
            read({name: target for part in parts for name, target in part.targets(f"model.layers.{layer}.").items()})
            for part in parts:
                part.prepare()
            self._decoders.append(decoder)
        if isinstance(self._embedding_VE, Int8Matrix):
            self._embedding_VE.seal()
        if self._head_VE is not None:
            self._head_VE = prepared(self._head_VE)

    def weights(self) -> list[Matrix]:
        parts = [part for decoder in self._decoders for part in _weighted(decoder)]
        parts += [] if self._norm is None else [self._norm]
        tables = [table for table in (self._embedding_VE, self._head_VE) if table is not None]
        return [*(weight for part in parts for weight in part.weights()), *tables]


class RotaryHeads:
    """The heads of a layer in a forward (see ``families.Heads``)."""

    def __init__(self, shape: LayerShape, layer: int, cos_sin: CosSin, rows: Rows) -> None:
        self._shape, self._layer, self._cos_sin, self._rows = shape, layer, cos_sin, rows

    def split(self, qkv_RX: Tensor) -> tuple[Tensor, Tensor]:
        shape = self._shape
        queries_keys = shape.num_heads + shape.num_kv_heads
        heads = qkv_RX.view(-1, queries_keys + shape.num_kv_heads, shape.key_dim)
        return heads[:, :queries_keys], heads[:, queries_keys:]

    def attend(self, queries_keys: Tensor, values_RKD: Tensor) -> Tensor:
        heads, rows = self._shape.num_heads, self._rows
        rotated = rotate(queries_keys, *self._cos_sin)
        rows.pool.write(self._layer, rows.slots, rotated[:, heads:], values_RKD)
        return rows.attention.attend(rotated[:, :heads], self._layer).flatten(1)


class _BoundNorm(Part):
    """A norm with its weight."""

    def __init__(self, part: RMSNorm, storage: Storage) -> None:
        self._part, self._weight_X = part, storage.empty(part.size)
        self._size, self._is_float32 = (part.size,), storage.dtype == torch.float32

    def __call__(self, rows: Tensor) -> Tensor:
        weight_X, eps = self._weight_X, self._part.eps
        if self._is_float32:
            return torch.rms_norm(rows, self._size, weight_X, eps)
        return torch.rms_norm(rows.float(), self._size, eps=eps).to(weight_X.dtype) * weight_X

    def prepare(self) -> None:
        """A vector is kept as it is."""

    def weights(self) -> list[Matrix]:
        return [self._weight_X]

    def targets(self, prefix: str) -> dict[str, Matrix]:
        """Where the tensors of a checkpoint are read to, by name."""
        return {prefix + name: self._weight_X for name in self._part.tensors()}


class _BoundLinear(Part):
    """Linear maps with their weights."""

    def __init__(self, part: Linear, storage: Storage, products: Products) -> None:
        self._part, self._products = part, products
        self._matrix: Matrix = storage.matrix(sum(part.outputs), part.inputs)
        self._bias = storage.empty(sum(part.outputs)) if part.has_bias else None

    @property
    def outputs(self) -> tuple[int, ...]:
        return self._part.outputs

    def __call__(self, rows: Tensor) -> Tensor:
        return self._products(rows, self._matrix, self._bias)

    def prepare(self) -> None:
        """Pack or seal the matrix, when its weights have been read."""
        self._matrix = prepared(self._matrix)

    def weights(self) -> list[Matrix]:
        return [self._matrix] if self._bias is None else [self._matrix, self._bias]

    def targets(self, prefix: str) -> dict[str, Matrix]:
        """Where the tensors of a checkpoint are read to, by name: slices of the fused ones."""
        names, sizes = self._part.names, list(self.outputs)
        weights = zip(names, self._matrix.split(sizes), strict=True)
        targets: dict[str, Matrix] = {f"{prefix}{name}.weight": weight for name, weight in weights}
        if self._bias is not None:
            biases = zip(names, self._bias.split(sizes), strict=True)
            targets |= {f"{prefix}{name}.bias": bias for name, bias in biases}
        return targets


class _BoundActivation(Part):
    def __init__(self, name: str) -> None:
        self._function = activation(name)

    def __call__(self, rows: Tensor) -> Tensor:
        return self._function(rows)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that transformers has under this name. Raises UserError if there is none."""
    if name == "silu":
        return functional.silu
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise UserError(f"hidden_act {name!r} in config.json is not known to transformers")
    function: Callable[[Tensor], Tensor] = ACT2FN[name]
    return function


def _bound(part: Part, storage: Storage, products: Products) -> Part:
    """The part with weights, which are not initialized."""
    if isinstance(part, RMSNorm):
        return _BoundNorm(part, storage)
    if isinstance(part, Linear):
        return _BoundLinear(part, storage, products)
    assert isinstance(part, Activation)
    return _BoundActivation(part.name)


def _weighted(decoder: Decoder) -> list[_BoundNorm | _BoundLinear]:
    return [part for part in decoder.parts().values() if isinstance(part, _BoundNorm | _BoundLinear)]
