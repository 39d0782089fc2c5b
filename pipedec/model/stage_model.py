"""Consecutive layers of a LLaMA-family model, with the embedding on the first stage and the head on the last.

Maps rows of any number of requests to rows. Knows nothing of other stages, tokenizers or decoding methods.

Shape legend: R rows in this step, P past tokens, N tree slots including this step's rows, H query heads, K key-value
heads, D head size, E hidden size, I inner size of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.config import ModelConfig
from pipedec.core import UserError
from pipedec.model.attention import LaneAttention, LaneRows, LayersShape, RowAttention, slots_of
from pipedec.model.bita import BitaWeights
from pipedec.model.cache import KVPool, KVShape
from pipedec.model.captured_graphs import Capture, CapturedGraphs, CosSin
from pipedec.model.flash_lanes import FlashLaneAttention, flash_kernel
from pipedec.model.matrices import Int8Matrix, Matrix, linear
from pipedec.model.rotary import Rotary, rotate
from pipedec.model.weights import Checkpoint, StageWeights
from pipedec.tree import is_mask

PADDED_ROWS = 16  # see ``StageModel.pad_rows``


class StageModel:
    """The layers of one stage, with uninitialized weights; ``load`` reads them from a checkpoint.

    Attributes:
        config: shape of the whole model.
        weights: of the stage's layers, embedding, final norm and head.
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
        self, config: ModelConfig, layers: range, dtype: torch.dtype, device: torch.device | str, quantize: str | None = None
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
        self.flash, _ = flash_kernel(dtype, self.device)
        self.capture: Capture | None = None
        self.capture_turn = 0, 1
        self._graphs: CapturedGraphs | None = None
        self._rotary = Rotary(config, dtype, self.device)
        self._activation = _activation(config.hidden_act)
        windows = tuple(config.sliding_windows[layer] for layer in layers)
        self._shape = LayersShape(windows, config.num_heads // config.num_kv_heads, config.hidden_size, dtype)
        self.weights = StageWeights(config, layers, dtype, self.device, quantize)
        self._bita: BitaWeights | None = None

    @classmethod
    def load(
        cls, directory: str | Path, layers: range, dtype: torch.dtype, device: torch.device | str,
        config: ModelConfig | None = None, progress: Callable[[int, int], None] | None = None, quantize: str | None = None,
    ) -> StageModel:  # fmt: skip
        """Read one stage from a Hugging Face checkpoint: only its own tensors, one at a time, quantized as they are read.

        Args:
            config: the model's shape; None to read it from ``directory``.
            progress: called with (tensors read, tensors in total) after each tensor.

        Raises:
            UserError: the checkpoint is unsupported, incomplete or damaged, or does not have these layers.
        """
        checkpoint = Checkpoint(directory)
        stage = cls(config or ModelConfig.from_directory(directory), layers, dtype, device, quantize)
        stage.weights.read(checkpoint, progress or (lambda *_: None))
        return stage

    @classmethod
    def random(cls, config: ModelConfig, layers: range, dtype: torch.dtype, device: torch.device | str) -> StageModel:
        """A stage with random weights, to measure a shape without a checkpoint."""
        stage = cls(config, layers, dtype, device)
        stage.weights.randomize()
        return stage

    @property
    def num_masks(self) -> int:
        """Mask rows that the BiTA was trained with; 0 without one."""
        return 0 if self._bita is None else self._bita.num_masks

    def attach(self, bita: BitaWeights) -> None:
        """Enable mask rows with these weights. Only pools made later hold the learned prompt."""
        self._bita = bita

    def make_pool(self, slots: int, block: int = 16) -> KVPool:
        """A pool for the caches of this stage's layers (see ``KVPool``)."""
        config, prompt = self.config, None if self._bita is None else self._bita.prompt
        shape = KVShape(len(self.layers), config.num_kv_heads, config.head_dim, self.dtype)
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
            ValueError: there are mask rows but no BiTA, or a cache has too few slots.
        """
        for lane in lanes:
            if lane.num_masks and self._bita is None:
                raise ValueError("mask rows need a BiTA")
        pool = lanes[0].cache.pool
        lengths_R = torch.cat([lane.lengths() for lane in lanes]) if self._rotary.depends_on_length else None
        cos_sin = self._rotary.cos_sin(torch.cat([lane.positions for lane in lanes]), lengths_R)
        bucket = None
        if self.capture is not None:
            if self._graphs is None or self._graphs.pool is not pool:  # graphs contain the addresses of their pool
                self._graphs = CapturedGraphs(self._shape, pool, self.capture)
            self._graphs.turn = self.capture_turn
            bucket = self._graphs.bucket_of(lanes)
        if self._graphs is not None and bucket is not None:
            hidden_RE = self._graphs.forward(bucket, self._compute, inputs, cos_sin, lanes)
        else:
            flash, shape = self.flash, self._shape
            attention: RowAttention = LaneAttention(lanes, shape) if flash is None else FlashLaneAttention(lanes, shape, flash)
            hidden_RE = self._compute(inputs, cos_sin, slots_of(lanes), pool, attention)
        for lane in lanes:
            lane.append()
        return hidden_RE

    @torch.inference_mode()
    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Final norm and head, as float32 [R, V] (float64 stays float64). Raises ValueError unless this is the last stage."""
        norm_E, head_VE = self.weights.final_norm_E, self.weights.head_VE
        if norm_E is None or head_VE is None:
            raise ValueError(f"layers {self.layers.start} to {self.layers.stop - 1} have no head: only the last stage does")
        product = _padded_linear if self.pad_rows else linear
        logits_RV = product(self._norm(hidden_RE, norm_E), head_VE)
        return logits_RV.to(torch.promote_types(self.dtype, torch.float32))

    def _compute(self, inputs: Tensor, cos_sin: CosSin, slots: slice | Tensor, pool: KVPool, attention: RowAttention) -> Tensor:
        """hidden_RE after all layers, whose keys and values are written to ``slots`` of the pool. Reads no tensor's values on the
        host, so it can be captured.
        """
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        product = _padded_linear if self.pad_rows else linear
        cos_R1D, sin_R1D = cos_sin[0][:, None], cos_sin[1][:, None]
        embedding_VE = self.weights.embedding_VE
        hidden_RE = inputs if embedding_VE is None else self._embedded(inputs, embedding_VE)
        for index, weights in enumerate(self.weights.layers):
            qkv = product(self._norm(hidden_RE, weights.input_norm), weights.qkv_weight, weights.qkv_bias)
            qkv = qkv.view(-1, heads + 2 * kv_heads, head_dim)
            queries_keys, values_RKD = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
            if weights.query_norm is not None and weights.key_norm is not None:
                queries_keys[:, :heads] = self._norm(queries_keys[:, :heads], weights.query_norm)
                queries_keys[:, heads:] = self._norm(queries_keys[:, heads:], weights.key_norm)
            rotated = rotate(queries_keys, cos_R1D, sin_R1D)
            pool.write(index, slots, rotated[:, heads:], values_RKD)
            attended_RHD = attention.attend(rotated[:, :heads], index)
            hidden_RE = product(attended_RHD.flatten(1), weights.output_weight, weights.output_bias).add_(hidden_RE)
            normed_RE = self._norm(hidden_RE, weights.post_norm)
            gate_RI, up_RI = product(normed_RE, weights.gate_up_weight, weights.gate_up_bias).chunk(2, dim=-1)
            inner_RI = self._activation(gate_RI).mul_(up_RI)
            hidden_RE = product(inner_RI, weights.down_weight, weights.down_bias).add_(hidden_RE)
        return hidden_RE

    def _embedded(self, token_ids_R: Tensor, embedding_VE: Tensor | Int8Matrix) -> Tensor:
        known_ids_R = token_ids_R if self._bita is None else token_ids_R.clamp(min=0)
        if isinstance(embedding_VE, Tensor):
            hidden_RE = functional.embedding(known_ids_R, embedding_VE)
        else:
            hidden_RE = embedding_VE.rows(known_ids_R)
        if self._bita is None:
            return hidden_RE
        masks_RE = functional.embedding((-1 - token_ids_R).clamp(min=0), self._bita.masks)
        return torch.where(is_mask(token_ids_R)[:, None], masks_RE, hidden_RE)

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of the last dimension, computed in float32 for every dtype, as in transformers."""
        if self.dtype == torch.float32:
            return functional.rms_norm(values, weight.shape, weight, self.config.rms_norm_eps)
        normed = functional.rms_norm(values.float(), weight.shape, eps=self.config.rms_norm_eps)
        return normed.to(self.dtype) * weight


def _padded_linear(rows: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """``linear`` of at least ``PADDED_ROWS`` rows (see ``StageModel.pad_rows``)."""
    missing = PADDED_ROWS - rows.shape[0]
    if missing <= 0:
        return linear(rows, weight, bias)
    return linear(functional.pad(rows, (0, 0, 0, missing)), weight, bias)[: rows.shape[0]]


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name == "silu":
        return functional.silu
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise UserError(f"hidden_act {name!r} in config.json is not known to transformers")
    activation: Callable[[Tensor], Tensor] = ACT2FN[name]
    return activation
