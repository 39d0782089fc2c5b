"""Layers of pipedec's own parts: a family's formula, with weights that are fused, packed and quantized as they are read.

Shapes as in ``stage_model``; X outputs of the fused projections of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.core.errors import UserError
from pipedec.families import Activation, Decoder, DecoderConfig, LayerShape, Linear, Part, RMSNorm, Shape
from pipedec.formats import Format
from pipedec.model.attention import Rows
from pipedec.model.kernels import add_rms_norm, rope_write, silu_mul
from pipedec.model.kernels.language import has_kernels
from pipedec.model.matrices import Matrix, Products
from pipedec.model.rotary import CosSin, Rotary
from pipedec.model.stage_layers import Progress, StageLayers, Storage
from pipedec.model.weights import Checkpoint, Target


class DecoderLayers(StageLayers):
    """See ``StageLayers``. The layers, embedding and head are made when they are read."""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig, layers: range, storage: Storage) -> None:
        super().__init__(config, layers, storage)
        self._rotary = Rotary(config, storage.dtype, storage.device)
        self._rotate = rope_write.rope_write if has_kernels(storage.device) else rope_write.reference
        self._decoders: list[Decoder] = []
        self._embedding_VE: Matrix | None = None
        self._norm = _BoundNorm(config.final_norm, storage) if self.is_last else None
        self._head_VE: Matrix | None = None

    def forward(self, inputs: Tensor, rows: Rows) -> Tensor:
        embedding_VE = self._embedding_VE
        hidden_RE = inputs if embedding_VE is None else self.embedded(inputs, embedding_VE.rows)
        cos_sin = self._rotary.cos_sin(rows.positions, rows.lengths)
        residual_RE = None
        for index, decoder in enumerate(self._decoders):
            heads = RotaryHeads(self.shape.layers[index], index, cos_sin, rows, self._rotate)
            hidden_RE, residual_RE = decoder.forward(hidden_RE, residual_RE, heads)
        return hidden_RE if residual_RE is None else hidden_RE.add_(residual_RE)

    def normed(self, hidden_RE: Tensor) -> Tensor:
        assert self._norm is not None
        return self._norm(hidden_RE)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        assert self._head_VE is not None
        return self.products(self.normed(hidden_RE), self._head_VE)

    def read(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """A layer's matrices are packed as soon as they are complete, and the next ones take the memory that this leaves."""
        config, numbers = self.config, count(1)
        embedding, head = config.embedding_tensors(), config.head_tensors(checkpoint.names)
        is_shared = self.is_first and self.is_last and head.keys() == embedding.keys()
        edges: dict[str, Target] = {}
        if self.is_first:
            self._embedding_VE = self.table(checkpoint, embedding)
            edges |= dict.fromkeys(embedding, self._embedding_VE)
        if self.is_last:
            self._head_VE = self._embedding_VE if is_shared else self.table(checkpoint, head)
            assert self._head_VE is not None
            edges |= dict.fromkeys(head, self._head_VE)
        if self._norm is not None:
            edges |= self._norm.targets("")
        total = len(edges) + sum(len(config.layer_tensors(layer)) for layer in self.layers)
        read = partial(checkpoint.read_into, progress=lambda: progress(next(numbers), total))
        read(edges)
        for layer in self.layers:
            prefix = f"model.layers.{layer}."
            format_of = partial(checkpoint.format_of, config)
            decoder = config.decoder(layer).bound(partial(_bound, layers=self, prefix=prefix, format_of=format_of))
            parts = _weighted(decoder)
            read({name: target for part in parts for name, target in part.targets(prefix).items()})
            for part in parts:
                part.prepare()
            self._decoders.append(decoder)
        if self._head_VE is not None:
            self._head_VE = self._head_VE.prepared(keeps_rows=is_shared)

    def tensors(self) -> list[Tensor]:
        parts = [part for decoder in self._decoders for part in _weighted(decoder)]
        parts += [] if self._norm is None else [self._norm]
        tables = [table for table in (self._embedding_VE, self._head_VE) if table is not None]
        return [
            *(tensor for part in parts for tensor in part.held()),
            *(tensor for table in tables for tensor in table.tensors()),
        ]


class RotaryHeads:
    """The heads of a layer in a forward (see ``families.Heads``)."""

    def __init__(self, shape: LayerShape, layer: int, cos_sin: CosSin, rows: Rows, rotate: Callable[..., Tensor]) -> None:
        self._shape, self._layer, self._cos_sin, self._rows, self._rotate = shape, layer, cos_sin, rows, rotate

    def split(self, qkv_RX: Tensor) -> tuple[Tensor, Tensor]:
        shape = self._shape
        queries_keys = shape.num_heads + shape.num_kv_heads
        heads = qkv_RX.view(-1, queries_keys + shape.num_kv_heads, shape.key_dim)
        return heads[:, :queries_keys], heads[:, queries_keys:]

    def attend(self, queries_keys: Tensor, values_RKD: Tensor, norms: tuple[Part, Part] | None = None) -> Tensor:
        rows, weights = self._rows, None
        if norms is not None:
            query_norm, key_norm = cast("tuple[_BoundNorm, _BoundNorm]", norms)
            weights = query_norm.weight_eps, key_norm.weight_eps
        q_RHD = self._rotate(queries_keys, values_RKD, self._cos_sin, rows.pool, self._layer, rows.slots, weights)
        return rows.attention.attend(q_RHD, self._layer).flatten(1)


class _BoundNorm(Part):
    """A norm with its weight."""

    def __init__(self, part: RMSNorm, storage: Storage) -> None:
        self._part = part
        self.weight_eps: rope_write.Norm = storage.empty(part.size), part.eps
        self._norm = add_rms_norm.add_rms_norm if has_kernels(storage.device) else add_rms_norm.reference

    def __call__(self, rows: Tensor) -> Tensor:
        return self._norm(rows, *self.weight_eps)

    def added(self, rows: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._norm(rows, *self.weight_eps, residual), rows

    def added_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return self._norm(rows, *self.weight_eps, None, residual, rows)

    def replace(self, rows: Tensor) -> None:
        self._norm(rows, *self.weight_eps, out_RX=rows)

    def prepare(self) -> None:
        """A vector is kept as it is."""

    def held(self) -> list[Tensor]:
        return [self.weight_eps[0]]

    def targets(self, prefix: str) -> dict[str, Target]:
        """Where the tensors of a checkpoint are read to, by name."""
        return {prefix + name: self.weight_eps[0] for name in self._part.tensors()}


class _BoundLinear(Part):
    """Linear maps with their weights."""

    def __init__(self, part: Linear, storage: Storage, products: Products, formats: Sequence[Format]) -> None:
        self._part, self._products = part, products
        self._matrix = storage.matrix(formats, part.outputs, part.inputs)
        self._bias = storage.empty(sum(part.outputs)) if part.has_bias else None

    @property
    def outputs(self) -> tuple[int, ...]:
        return self._part.outputs

    def __call__(self, rows: Tensor) -> Tensor:
        return self._products(rows, self._matrix, self._bias)

    def prepare(self) -> None:
        """See ``Matrix.prepared``."""
        self._matrix = self._matrix.prepared()

    def held(self) -> list[Tensor]:
        return self._matrix.tensors() + ([] if self._bias is None else [self._bias])

    def targets(self, prefix: str) -> dict[str, Target]:
        """Where the tensors of a checkpoint are read to, by name: slices of the fused ones."""
        names, sizes = self._part.names, list(self.outputs)
        weights = zip(names, self._matrix.split(sizes), strict=True)
        targets: dict[str, Target] = {f"{prefix}{name}.weight": weight for name, weight in weights}
        if self._bias is not None:
            biases = zip(names, self._bias.split(sizes), strict=True)
            targets |= {f"{prefix}{name}.bias": bias for name, bias in biases}
        return targets


class _BoundActivation(Part):
    def __init__(self, name: str, device: torch.device) -> None:
        function = activation(name)
        has_kernel = function is functional.silu and has_kernels(device)
        self.gated = silu_mul.silu_mul if has_kernel else partial(silu_mul.reference, activation=function)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that transformers has under this name. Raises UserError if there is none."""
    if name == "silu":
        return functional.silu
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise UserError(f"hidden_act {name!r} in config.json is not known to transformers")
    function: Callable[[Tensor], Tensor] = ACT2FN[name]
    return function


def _bound(part: Part, layers: DecoderLayers, prefix: str, format_of: Callable[[str, Shape], Format]) -> Part:
    """The part with weights, which are not initialized."""
    if isinstance(part, RMSNorm):
        return _BoundNorm(part, layers.storage)
    if isinstance(part, Linear):
        formats = [format_of(prefix + name, shape) for name, shape in part.tensors().items() if name.endswith(".weight")]
        return _BoundLinear(part, layers.storage, layers.products, formats)
    assert isinstance(part, Activation)
    return _BoundActivation(part.name, layers.storage.device)


def _weighted(decoder: Decoder) -> list[_BoundNorm | _BoundLinear]:
    return [part for part in decoder.parts().values() if isinstance(part, _BoundNorm | _BoundLinear)]
