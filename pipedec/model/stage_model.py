"""Consecutive layers of a LLaMA-family model, with the embedding on the first stage and the head on the last.

Maps rows of any number of requests to rows. Knows nothing of other stages, tokenizers or decoding methods.

Shape legend: R rows in this step, P past tokens, N tree slots including this step's rows, H query heads, K key-value
heads, D head size, E hidden size, I inner size of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.config import ModelConfig
from pipedec.core import UserError
from pipedec.model.attention import flash_kernel
from pipedec.model.bita import BitaWeights
from pipedec.model.cache import Pool
from pipedec.model.captured_graphs import Capture, CapturedGraphs, CosSin, LayersShape
from pipedec.model.checkpoint import EMBEDDING, FINAL_NORM, Checkpoint, Destination
from pipedec.model.flash_lanes import FlashLaneAttention
from pipedec.model.lane_rows import LaneAttention, LaneRows, RowAttention, slots_of
from pipedec.model.packed import pack, pays
from pipedec.model.pool import KVPool, KVShape
from pipedec.model.quantized import EMPTY_MATRICES, Int8Matrix, Matrix, QuantizedMatrix, linear
from pipedec.model.rotary import Rotary, rotate
from pipedec.tree import is_mask

PADDED_ROWS = 16  # see ``StageModel.pad_rows``


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


class StageModel:
    """The layers of one stage, with uninitialized weights; ``load`` reads them from a checkpoint.

    Attributes:
        config: shape of the whole model.
        layers: the layers of this stage.
        is_first: whether the stage holds the embedding.
        is_last: whether the stage holds the final norm and the head.
        pad_rows: pad matrix products to ``PADDED_ROWS`` rows. Where a row of a product of at least that many does not depend on
            their number, as on the CPUs that were measured, the bits of an answer then do not depend on other requests.
        flash: attends for all requests at once in forwards that are not captured, with the arguments of
            ``flash_attn_varlen_func``; None attends request by request.
        capture: captures forwards of few rows, which are then replayed (see ``CapturedGraphs``); None computes each as it is.
        capture_turn: which of them may be captured if they are new (see ``CapturedGraphs.turn``).

    Args:
        dtype: of activations, caches, and weights that are not quantized.
        quantize: how the matrices of the layers are kept: ``int8`` or ``int4``; None for ``dtype``. With either, embedding and
            head take 8 bits; norms and biases keep ``dtype``.

    Raises:
        UserError: the model does not have these layers, or their sizes do not allow ``quantize``.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        dtype: torch.dtype,
        device: torch.device | str,
        quantize: str | None = None,
    ) -> None:
        if not 0 <= layers.start < layers.stop <= config.num_layers or layers.step != 1:
            raise UserError(f"layers {layers.start} to {layers.stop - 1} do not exist in a model of {config.num_layers} layers")
        self.config = config
        self.layers = layers
        self.dtype = dtype
        self.device = torch.device(device)
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        self.pad_rows = False
        self.flash = flash_kernel(dtype, self.device)
        self.capture: Capture | None = None
        self.capture_turn = 0, 1
        self._graphs: CapturedGraphs | None = None
        self._quantize = quantize
        self._rotary = Rotary(config, dtype, self.device)
        self._activation = _activation(config.hidden_act)
        self._windows = tuple(config.sliding_windows[layer] for layer in layers)
        self._weights = [self._empty_layer() for _ in layers]
        embedding = (config.vocab_size, config.hidden_size)
        self._embedding_VE = self._empty_table(*embedding) if self.is_first else None
        self._final_norm_E = self._empty(config.hidden_size) if self.is_last else None
        self._head_VE = self._empty_table(*embedding) if self.is_last else None
        self._bita: BitaWeights | None = None

    @classmethod
    def load(
        cls,
        directory: str | Path,
        layers: range,
        dtype: torch.dtype,
        device: torch.device | str,
        config: ModelConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
        quantize: str | None = None,
    ) -> StageModel:
        """Read one stage from a Hugging Face checkpoint: only its own tensors, one at a time, quantized as they are read.

        Args:
            config: the model's shape; None to read it from ``directory``.
            progress: called with (tensors read, tensors in total) after each tensor.

        Raises:
            UserError: the checkpoint is unsupported, incomplete or damaged, or does not have these layers.
        """
        config = config or ModelConfig.from_directory(directory)
        checkpoint = Checkpoint(directory)
        stage = cls(config, layers, dtype, device, quantize)
        head_name = checkpoint.head_name(config)
        if stage.is_first and stage.is_last and head_name == EMBEDDING:
            stage._head_VE = stage._embedding_VE
        names = checkpoint.tensor_names(config, layers, stage.is_first, stage.is_last)
        stage._read(checkpoint, names, head_name, progress or (lambda *_: None))
        stage._seal()
        return stage

    @classmethod
    def random(cls, config: ModelConfig, layers: range, dtype: torch.dtype, device: torch.device | str) -> StageModel:
        """A stage with random weights, to measure a shape without a checkpoint."""
        stage = cls(config, layers, dtype, device)
        for tensor in stage._tensors():
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(std=tensor.shape[1] ** -0.5)
        stage._weights = [_packed(weights) for weights in stage._weights]
        stage._pack_head()
        return stage

    @property
    def num_layers(self) -> int:
        """Number of layers of this stage."""
        return len(self.layers)

    @property
    def num_masks(self) -> int:
        """Mask rows that the BiTA was trained with; 0 without one."""
        return 0 if self._bita is None else self._bita.num_masks

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes; a tied head that shares the embedding counts once, unless it is packed."""
        return sum({id(tensor): tensor.nbytes for tensor in self._tensors()}.values())

    def _seal(self) -> None:
        for matrix in {id(matrix): matrix for matrix in self._weight_list() if isinstance(matrix, QuantizedMatrix)}.values():
            matrix.seal()

    def attach(self, bita: BitaWeights) -> None:
        """Enable mask rows with these weights. Only pools made afterwards hold the learned prompt."""
        self._bita = bita

    def make_pool(self, slots: int, block: int = 16) -> KVPool:
        """A pool for the caches of this stage's layers (see ``KVPool``)."""
        config, prompt = self.config, None if self._bita is None else self._bita.prompt
        shape = KVShape(self.num_layers, config.num_kv_heads, config.head_dim, self.dtype)
        return KVPool(shape, slots, block, prompt, self.device)

    @torch.inference_mode()
    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        """Run rows of some requests through the stage's layers and append them to the requests' caches.

        Rows attend to rows of their own request only. Mask rows (BiTA) cannot influence ordinary rows, which attend neither to
        this step's mask rows nor to the learned prompt.

        Args:
            inputs: on the first stage token ids, int64 [R]; on the others the previous stage's hidden_RE. The rows of ``lanes``,
                one lane after the other.
            lanes: at least one; the caches are of one pool, and each is of one lane.

        Returns:
            hidden_RE, before the final norm.

        Raises:
            ValueError: a lane has no rows, its mask is not [rows, slots], its prompt chunk follows tree rows, or there are mask
                rows but no BiTA, or a cache has too few slots.
        """
        pool, cos_sin = self._check(lanes), self._cos_sin(lanes)
        graphs = self._graphs_in(pool)
        bucket = None if graphs is None else graphs.bucket_of(lanes)
        if graphs is None or bucket is None:
            rows = lanes, self._windows, self.config.queries_per_kv_head, self.dtype
            attention = LaneAttention(*rows) if self.flash is None else FlashLaneAttention(*rows, self.flash)
            hidden_RE = self._computed(inputs, cos_sin, slots_of(lanes), pool, attention)
        else:
            hidden_RE = graphs.forward(bucket, self._computed, inputs, cos_sin, lanes)
        for lane in lanes:
            lane.append()
        return hidden_RE

    @torch.inference_mode()
    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Final norm and head, as float32 [R, V] (float64 stays float64).

        Raises:
            ValueError: this stage is not the last one.
        """
        if self._final_norm_E is None or self._head_VE is None:
            raise ValueError(f"layers {self.layers.start} to {self.layers.stop - 1} have no head: only the last stage does")
        logits_RV = self._linear(self._norm(hidden_RE, self._final_norm_E), self._head_VE)
        return logits_RV.to(torch.promote_types(self.dtype, torch.float32))

    def _computed(self, inputs: Tensor, cos_sin: CosSin, slots: slice | Tensor, pool: Pool, attention: RowAttention) -> Tensor:
        """All layers, hidden_RE. A function of tensors that reads none of their values on the host, so it can be captured.

        Args:
            cos_sin: cos_RD, sin_RD.
            slots: of the pool, to which keys and values are written.
            attention: of these rows.
        """
        hidden_RE = inputs if self._embedding_VE is None else self._embedded(inputs, self._embedding_VE)
        for index, weights in enumerate(self._weights):
            q_RHD, keys_RKD, values_RKD = self._projected(weights, self._norm(hidden_RE, weights.input_norm), *cos_sin)
            pool.write(index, slots, keys_RKD, values_RKD)
            attended_RHD = attention.attend(q_RHD, index)
            hidden_RE = self._linear(attended_RHD.flatten(1), weights.output_weight, weights.output_bias).add_(hidden_RE)
            hidden_RE = self._add_mlp(hidden_RE, weights)
        return hidden_RE

    def _graphs_in(self, pool: Pool) -> CapturedGraphs | None:
        """The graphs of forwards in this pool, whose addresses they contain; None if nothing is captured."""
        if self.capture is None:
            return None
        if self._graphs is None or self._graphs.pool is not pool:
            shape = LayersShape(self._windows, self.config.queries_per_kv_head, self.config.hidden_size)
            self._graphs = CapturedGraphs(shape, pool, self.capture)
        self._graphs.turn = self.capture_turn
        return self._graphs

    def _cos_sin(self, lanes: Sequence[LaneRows]) -> CosSin:
        positions_R = torch.cat([lane.positions for lane in lanes])
        lengths_R = torch.cat([lane.lengths() for lane in lanes]) if self._rotary.depends_on_length else None
        return self._rotary.cos_sin(positions_R, lengths_R)

    def _check(self, lanes: Sequence[LaneRows]) -> Pool:
        """Check the lanes; returns the pool of their caches."""
        for lane in lanes:
            lane.check()
            if lane.num_masks and self._bita is None:
                raise ValueError("mask rows need a BiTA")
        return lanes[0].cache.pool

    def _embedded(self, token_ids_R: Tensor, embedding_VE: Tensor | Int8Matrix) -> Tensor:
        if self._bita is None:
            return _table_rows(token_ids_R, embedding_VE)
        hidden_RE = _table_rows(token_ids_R.clamp(min=0), embedding_VE)
        masks_RE = functional.embedding((-1 - token_ids_R).clamp(min=0), self._bita.masks)
        return torch.where(is_mask(token_ids_R)[:, None], masks_RE, hidden_RE)

    def _projected(
        self, weights: LayerWeights, normed_RE: Tensor, cos_RD: Tensor, sin_RD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q_RHD, keys_RKD, values_RKD. Queries and keys are rotated together."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = self._linear(normed_RE, weights.qkv_weight, weights.qkv_bias).view(len(normed_RE), -1, self.config.head_dim)
        if weights.query_norm is not None and weights.key_norm is not None:
            qkv[:, :heads] = self._norm(qkv[:, :heads], weights.query_norm)
            qkv[:, heads : heads + kv_heads] = self._norm(qkv[:, heads : heads + kv_heads], weights.key_norm)
        rotated = rotate(qkv[:, : heads + kv_heads], cos_RD, sin_RD)
        return rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]

    def _add_mlp(self, hidden_RE: Tensor, weights: LayerWeights) -> Tensor:
        normed_RE = self._norm(hidden_RE, weights.post_norm)
        gate_RI, up_RI = self._linear(normed_RE, weights.gate_up_weight, weights.gate_up_bias).chunk(2, dim=-1)
        return self._linear(self._activation(gate_RI).mul_(up_RI), weights.down_weight, weights.down_bias).add_(hidden_RE)

    def _linear(self, rows: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """rows · weightᵀ (+ bias)."""
        missing = PADDED_ROWS - rows.shape[0]
        if not self.pad_rows or missing <= 0:
            return linear(rows, weight, bias)
        return linear(functional.pad(rows, (0, 0, 0, missing)), weight, bias)[: rows.shape[0]]

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of the last dimension, computed in float32 for every dtype, as in transformers."""
        if self.dtype == torch.float32:
            return functional.rms_norm(values, weight.shape, weight, self.config.rms_norm_eps)
        normed = functional.rms_norm(values.float(), weight.shape, eps=self.config.rms_norm_eps)
        return normed.to(self.dtype) * weight

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _empty_matrix(self, outputs: int, inputs: int) -> Matrix:
        if self._quantize is None:
            return self._empty(outputs, inputs)
        return EMPTY_MATRICES[self._quantize](outputs, inputs, self.dtype, self.device)

    def _empty_table(self, tokens: int, hidden: int) -> Tensor | Int8Matrix:
        """For an embedding or a head."""
        if self._quantize is None:
            return self._empty(tokens, hidden)
        return Int8Matrix.empty(tokens, hidden, self.dtype, self.device)

    def _empty_layer(self) -> LayerWeights:
        config = self.config
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

    def _read(self, checkpoint: Checkpoint, names: list[str], head_name: str, progress: Callable[[int, int], None]) -> None:
        """Read these tensors. A layer's matrices are packed as soon as they are there, and the next ones read in their place."""
        done, matrices = 0, dict[str, Tensor]()
        for layer, group in groupby(names, _layer_of):
            part = list(group)
            weights = None if layer is None else replace(self._weights[layer - self.layers.start], **matrices)
            targets = self._edge_targets(head_name) if weights is None else self._layer_targets(f"model.layers.{layer}.", weights)
            read = {name: targets[name] for name in part}
            checkpoint.read_into(read, _behind(done, len(names), progress))
            done += len(part)
            if layer is not None and weights is not None:
                matrices = _packable(weights)
                self._weights[layer - self.layers.start] = _packed(weights)
        self._pack_head()

    def _pack_head(self) -> None:
        if isinstance(self._head_VE, Tensor):
            self._head_VE = pack(self._head_VE)

    def _weight_list(self) -> list[Matrix]:
        weights = [weight for layer in self._weights for weight in vars(layer).values()]
        weights += [self._embedding_VE, self._final_norm_E, self._head_VE]
        return [weight for weight in weights if weight is not None]

    def _tensors(self) -> list[Tensor]:
        kept = ([weight] if isinstance(weight, Tensor) else weight.tensors() for weight in self._weight_list())
        return [tensor for tensors in kept for tensor in tensors]

    def _edge_targets(self, head_name: str) -> dict[str, Destination]:
        """The destinations of the checkpoint's tensors that are of no layer."""
        targets: dict[str, Destination] = {}
        if self._final_norm_E is not None and self._head_VE is not None:
            targets[FINAL_NORM] = self._final_norm_E
            targets[head_name] = self._head_VE
        if self._embedding_VE is not None:
            targets[EMBEDDING] = self._embedding_VE
        return targets

    def _layer_targets(self, prefix: str, weights: LayerWeights) -> dict[str, Destination]:
        """The destination of every tensor of a layer: a weight, or a slice of a fused one."""
        config = self.config
        keys = config.num_kv_heads * config.head_dim
        fused = (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), weights.qkv_weight, weights.qkv_bias),
            (("self_attn.o_proj",), weights.output_weight, weights.output_bias),
            (("mlp.gate_proj", "mlp.up_proj"), weights.gate_up_weight, weights.gate_up_bias),
            (("mlp.down_proj",), weights.down_weight, weights.down_bias),
        )
        targets: dict[str, Destination] = {
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


def _behind(done: int, total: int, progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """``progress`` for a part of ``total`` tensors, behind ``done`` others."""
    return lambda read, _: progress(done + read, total)


def _packable(weights: LayerWeights) -> dict[str, Tensor]:
    """The weights that ``packed`` changes, by field."""
    return {
        name: value for name, value in vars(weights).items() if isinstance(value, Tensor) and value.dim() == 2 and pays(value)
    }


def _packed(weights: LayerWeights) -> LayerWeights:
    return replace(weights, **{name: pack(matrix) for name, matrix in _packable(weights).items()})


def _layer_of(name: str) -> int | None:
    """The layer that a tensor of a checkpoint belongs to; None for embedding, final norm and head."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None


def _table_rows(token_ids_R: Tensor, embedding_VE: Tensor | Int8Matrix) -> Tensor:
    if isinstance(embedding_VE, Tensor):
        return functional.embedding(token_ids_R, embedding_VE)
    return embedding_VE.rows(token_ids_R)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name == "silu":
        return functional.silu
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise UserError(f"hidden_act {name!r} in config.json is not known to transformers")
    activation: Callable[[Tensor], Tensor] = ACT2FN[name]
    return activation
