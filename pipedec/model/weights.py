"""The weights of one stage: their list, and how they are read from a checkpoint, quantized and packed.

Knows no activations. Shapes as in ``stage_model``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, groupby

import torch
from torch import Tensor

from pipedec.checkpoints.parts import EMBEDDING, FINAL_NORM
from pipedec.config import ModelConfig
from pipedec.model.checkpoint import Checkpoint
from pipedec.model.matrices import EMPTY_MATRICES, Int8Matrix, Matrix, QuantizedMatrix, pack, pays


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one transformer layer. Query, key and value projections are fused into one matrix, gate and up into another."""

    input_norm: Tensor  # [E]
    qkv_weight: Matrix  # [(H + 2K)·D, E]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None  # [D]
    output_weight: Matrix  # [E, H·D]
    output_bias: Tensor | None
    post_norm: Tensor  # [E]
    gate_up_weight: Matrix  # [2I, E]
    gate_up_bias: Tensor | None
    down_weight: Matrix  # [E, I]
    down_bias: Tensor | None


class StageWeights:
    """The weights of consecutive layers, and those before or after them; not initialized until they are read.

    Attributes:
        layers: by layer.
        embedding_VE: on the first stage, else None.
        final_norm_E, head_VE: on the last stage, else None.

    Args:
        layers, dtype, quantize: as of ``StageModel``.

    Raises:
        UserError: the sizes of the matrices do not allow ``quantize``.
    """

    def __init__(
        self, config: ModelConfig, layers: range, dtype: torch.dtype, device: torch.device, quantize: str | None = None
    ) -> None:
        self._config = config
        self._numbers = layers
        self._dtype = dtype
        self._device = device
        self._quantize = quantize
        self.layers = [self._empty_layer() for _ in layers]
        is_last = layers.stop == config.num_layers
        self.embedding_VE = self._empty_table() if layers.start == 0 else None
        self.final_norm_E = self._empty(config.hidden_size) if is_last else None
        self.head_VE = self._empty_table() if is_last else None

    @property
    def num_bytes(self) -> int:
        """Size in bytes; a tied head that shares the embedding counts once, unless it is packed."""
        return sum({id(tensor): tensor.nbytes for tensor in self._tensors()}.values())

    def read(self, checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> None:
        """Read them, one tensor at a time, quantized as they are read.

        A layer's matrices are packed as soon as they are complete, and the next ones read in their place.

        Args:
            progress: called with (tensors read, tensors in total) after each tensor.

        Raises:
            UserError: the checkpoint is incomplete or damaged.
        """
        head_name, is_first, is_last = checkpoint.head_name(self._config), self.embedding_VE is not None, self.head_VE is not None
        if is_first and is_last and head_name == EMBEDDING:
            self.head_VE = self.embedding_VE
        names = list(checkpoint.expected_shapes(self._config, self._numbers, is_first, is_last))
        read, matrices = count(1), dict[str, Tensor]()
        for layer, group in groupby(names, _layer_of):
            weights = None if layer is None else replace(self.layers[layer - self._numbers.start], **matrices)
            targets = self._edge_targets(head_name) if weights is None else self._layer_targets(f"model.layers.{layer}.", weights)
            checkpoint.read_into({name: targets[name] for name in group}, lambda: progress(next(read), len(names)))
            if layer is not None and weights is not None:
                matrices = _packable(weights)
                self.layers[layer - self._numbers.start] = _packed(weights)
        self._pack_head()
        for matrix in {id(matrix): matrix for matrix in self._all() if isinstance(matrix, QuantizedMatrix)}.values():
            matrix.seal()

    def randomize(self) -> None:
        """Fill them with random numbers, to measure a shape without a checkpoint."""
        for tensor in self._tensors():
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(std=tensor.shape[1] ** -0.5)
        self.layers = [_packed(weights) for weights in self.layers]
        self._pack_head()

    def _pack_head(self) -> None:
        if isinstance(self.head_VE, Tensor):
            self.head_VE = pack(self.head_VE)

    def _all(self) -> list[Matrix]:
        weights = [weight for layer in self.layers for weight in vars(layer).values()]
        return [weight for weight in (*weights, self.embedding_VE, self.final_norm_E, self.head_VE) if weight is not None]

    def _tensors(self) -> list[Tensor]:
        kept = ([weight] if isinstance(weight, Tensor) else weight.tensors() for weight in self._all())
        return [tensor for tensors in kept for tensor in tensors]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _empty_matrix(self, outputs: int, inputs: int) -> Matrix:
        if self._quantize is None:
            return self._empty(outputs, inputs)
        return EMPTY_MATRICES[self._quantize](outputs, inputs, self._dtype, self._device)

    def _empty_table(self) -> Tensor | Int8Matrix:
        """An empty embedding or head."""
        size = self._config.vocab_size, self._config.hidden_size
        return self._empty(*size) if self._quantize is None else Int8Matrix.empty(*size, self._dtype, self._device)

    def _empty_layer(self) -> LayerWeights:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, qkv = config.num_heads * config.head_dim, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        return LayerWeights(
            input_norm=self._empty(hidden),
            qkv_weight=self._empty_matrix(qkv, hidden),
            qkv_bias=self._empty(qkv) if config.attention_bias else None,
            query_norm=self._empty(config.head_dim) if config.qk_norm else None,
            key_norm=self._empty(config.head_dim) if config.qk_norm else None,
            output_weight=self._empty_matrix(hidden, queries),
            output_bias=self._empty(hidden) if config.output_bias else None,
            post_norm=self._empty(hidden),
            gate_up_weight=self._empty_matrix(2 * inner, hidden),
            gate_up_bias=self._empty(2 * inner) if config.mlp_bias else None,
            down_weight=self._empty_matrix(hidden, inner),
            down_bias=self._empty(hidden) if config.mlp_bias else None,
        )

    def _edge_targets(self, head_name: str) -> dict[str, Matrix]:
        """The destinations of the checkpoint's tensors that belong to no layer."""
        targets: dict[str, Matrix] = {}
        if self.final_norm_E is not None and self.head_VE is not None:
            targets[FINAL_NORM] = self.final_norm_E
            targets[head_name] = self.head_VE
        if self.embedding_VE is not None:
            targets[EMBEDDING] = self.embedding_VE
        return targets

    def _layer_targets(self, prefix: str, weights: LayerWeights) -> dict[str, Matrix]:
        """The destination of every tensor of a layer: a weight, or a slice of a fused one."""
        config = self._config
        keys = config.num_kv_heads * config.head_dim
        fused = (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), weights.qkv_weight, weights.qkv_bias),
            (("self_attn.o_proj",), weights.output_weight, weights.output_bias),
            (("mlp.gate_proj", "mlp.up_proj"), weights.gate_up_weight, weights.gate_up_bias),
            (("mlp.down_proj",), weights.down_weight, weights.down_bias),
        )
        targets: dict[str, Matrix] = {
            prefix + "input_layernorm.weight": weights.input_norm,
            prefix + "post_attention_layernorm.weight": weights.post_norm,
        }
        if weights.query_norm is not None and weights.key_norm is not None:
            targets[prefix + "self_attn.q_norm.weight"] = weights.query_norm
            targets[prefix + "self_attn.k_norm.weight"] = weights.key_norm
        for names, weight, bias in fused:
            sizes = [len(weight) - 2 * keys, keys, keys] if len(names) == 3 else [len(weight) // len(names)] * len(names)
            for suffix, fused_weight in (("weight", weight), ("bias", bias)):
                if fused_weight is not None:
                    parts = fused_weight.split(sizes)
                    targets.update({f"{prefix}{name}.{suffix}": part for name, part in zip(names, parts, strict=True)})
        return targets


def _packable(weights: LayerWeights) -> dict[str, Tensor]:
    """The weights that ``_packed`` changes, by field."""
    return {
        name: value for name, value in vars(weights).items() if isinstance(value, Tensor) and value.dim() == 2 and pays(value)
    }


def _packed(weights: LayerWeights) -> LayerWeights:
    return replace(weights, **{name: pack(matrix) for name, matrix in _packable(weights).items()})


def _layer_of(name: str) -> int | None:
    """The layer that a tensor of a checkpoint belongs to; None for embedding, final norm and head."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None
