"""Consecutive layers of a model, with the embedding on the first stage and the head on the last.

Maps rows of any number of requests to rows. Knows nothing of other stages, tokenizers or decoding methods.

Shape legend: R rows in this step, P past tokens, N tree slots including this step's rows, H query heads, K key-value
heads, D head size, E hidden size, I inner size of the MLP, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.core.limits import MAX_NUM_SEQS
from pipedec.families import DecoderConfig, ModelConfig, StateCounts, TransformersConfig, model_config
from pipedec.model.attention import LaneAttention, RowAttention, Rows, TableAttention
from pipedec.model.bita import BitaWeights
from pipedec.model.cache import KVPool
from pipedec.model.captured_graphs import Capture, CapturedGraphs, CaptureError
from pipedec.model.decoder_layers import DecoderLayers
from pipedec.model.flash_lanes import FlashLaneAttention, flash_kernel
from pipedec.model.formats import Widens, as_stored
from pipedec.model.kernels.language import has_kernels
from pipedec.model.recurrent import LaneRecurrence, Recurrence
from pipedec.model.row_tables import RowTables
from pipedec.model.rows import LaneRows, slots_of
from pipedec.model.stage_layers import Progress, StageLayers, Storage
from pipedec.model.states import StatePool
from pipedec.model.table_recurrence import TableRecurrence
from pipedec.model.weights import Checkpoint

logger = logging.getLogger(__name__)
_USUAL_STATES = StateCounts(MAX_NUM_SEQS, 16 * MAX_NUM_SEQS)  # in a pool whose size is not configured


class StageModel:
    """The layers of one stage, with uninitialized weights; ``load`` reads them from a checkpoint.

    Attributes:
        config: of the whole model.
        layers: which layers of it.
        stack: what computes: these layers, embedding, final norm and head.
        is_first: whether the stage holds the embedding.
        is_last: whether the stage holds the final norm and the head.
        flash: attends for all requests at once in forwards that are not captured, with the arguments of
            ``flash_attn_varlen_func``; None attends request by request.
        capture: captures forwards of few rows, which are then replayed (see ``CapturedGraphs``); None computes each as it is.
        capture_turn: which of them may be captured if they are new (see ``CapturedGraphs.turn``).

    Args:
        dtype, quantize, widens: see ``Storage``.

    Raises:
        UserError: the model does not have these layers, or their sizes do not allow ``quantize``.
    """

    def __init__(
        self, config: ModelConfig, layers: range, dtype: torch.dtype, device: torch.device | str, quantize: str | None = None,
        widens: Widens = as_stored,
    ) -> None:  # fmt: skip
        if not 0 <= layers.start < layers.stop <= config.num_hidden_layers or layers.step != 1:
            raise UserError(
                f"layers {layers.start} to {layers.stop - 1} do not exist in a model of {config.num_hidden_layers} layers"
            )
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.layers = layers
        self.stack = _stack(config, layers, Storage(dtype, self.device, quantize, widens))
        self.is_first, self.is_last = self.stack.is_first, self.stack.is_last
        self.flash = flash_kernel(dtype, self.device)[0] if _suits_flash(config) else None
        self.uses_tables = has_kernels(self.device) and _suits_tables(config)
        self.capture: Capture | None = None
        self.capture_turn = 0, 1
        self._graphs: CapturedGraphs | None = None
        self._bita: BitaWeights | None = None

    @classmethod
    def load(
        cls, directory: str | Path, layers: range, dtype: torch.dtype, device: torch.device | str,
        config: ModelConfig | None = None, progress: Progress | None = None, quantize: str | None = None,
        widens: Widens = as_stored,
    ) -> StageModel:  # fmt: skip
        """Read one stage from a Hugging Face checkpoint: only its own tensors, one at a time, quantized as they are read.

        Args:
            config: the model's; None to read it from ``directory``.
            progress: called with (tensors read, tensors in total) after each tensor.

        Raises:
            UserError: the checkpoint is unsupported, incomplete or damaged, or does not have these layers.
        """
        checkpoint = Checkpoint(directory)
        stage = cls(config or model_config(directory), layers, dtype, device, quantize, widens)
        if stage.is_first and (left_out := stage.stack.config.left_out(checkpoint.names)):
            parts = ", ".join(f"{part} ({count} tensor{'s' * (count > 1)})" for part, count in left_out.items())
            logger.info("left out of %s: %s", directory, parts)
        stage.stack.read(checkpoint, progress or (lambda *_: None))
        return stage

    @property
    def num_masks(self) -> int:
        """Mask rows that the BiTA was trained with; 0 without one."""
        return 0 if self._bita is None else self._bita.num_masks

    def attach(self, bita: BitaWeights) -> None:
        """Enable mask rows with these weights. Only pools made later hold the learned prompt."""
        self._bita = bita
        self.stack.mask_embeddings = bita.masks

    def make_pool(self, slots: int, block: int = 16, states: StateCounts | None = None) -> KVPool:
        """A pool for the caches of this stage's layers (see ``KVPool``). ``states``: what the pools of recurrent layers hold."""
        prompt = None if self._bita is None else self._bita.prompt
        layers = self.config.layers[self.layers.start : self.layers.stop]
        is_recurrent = len(self.stack.shape.layers) < len(layers)
        memory = StatePool(layers, self.dtype, states or _USUAL_STATES, self.device) if is_recurrent else None
        return KVPool([layer.cached for layer in layers], self.dtype, slots, block, prompt, self.device, memory)

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
        pool, shape = lanes[0].cache.pool, self.stack.shape
        positions, lengths = torch.cat([lane.positions for lane in lanes]), torch.cat([lane.lengths() for lane in lanes])
        bucket = None
        if self.capture is not None and self.stack.can_capture and _suits_tables(self.config):
            if self._graphs is None or self._graphs.pool is not pool:  # graphs contain the addresses of their pool
                self._graphs = CapturedGraphs(shape, pool, self.capture)
            self._graphs.turn = self.capture_turn
            bucket = self._graphs.bucket_of(lanes)
        hidden_RE = None
        if self._graphs is not None and bucket is not None:
            try:
                hidden_RE = self._graphs.forward(bucket, self.stack.forward, inputs, (positions, lengths), lanes)
            except CaptureError as error:
                logger.warning("%s: forwards are launched kernel by kernel from now on", error)
                self.capture = self._graphs = None
        if hidden_RE is None:
            attention, recurrence = self._attention(lanes, positions)
            hidden_RE = self.stack.forward(inputs, Rows(positions, lengths, slots_of(lanes), pool, attention, recurrence))
        for lane in lanes:
            lane.append()
        return hidden_RE

    def _attention(self, lanes: Sequence[LaneRows], positions: Tensor) -> tuple[RowAttention, Recurrence | None]:
        """Attention and recurrence of a forward that is not captured."""
        shape, pool = self.stack.shape, lanes[0].cache.pool
        if self.flash is not None and FlashLaneAttention.suits(lanes):
            return FlashLaneAttention(lanes, shape, self.flash), None if pool.states is None else LaneRecurrence(lanes)
        if not self.uses_tables and (pool.states is None or not has_kernels(self.device)):
            return LaneAttention(lanes, shape), None if pool.states is None else LaneRecurrence(lanes)
        tables = RowTables.of(lanes, shape.tile_tokens, shape.has_reach)
        attention = TableAttention(tables, positions, pool, shape) if self.uses_tables else LaneAttention(lanes, shape)
        return attention, None if pool.states is None else TableRecurrence(tables, pool.states, lanes)

    @torch.inference_mode()
    def normed(self, hidden_RE: Tensor) -> Tensor:
        """After the final norm, [R, E], on the last stage."""
        return self.stack.normed(hidden_RE)

    @torch.inference_mode()
    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Final norm and head, as float32 [R, V] (float64 stays float64). Raises ValueError unless this is the last stage."""
        if not self.is_last:
            raise ValueError(f"layers {self.layers.start} to {self.layers.stop - 1} have no head: only the last stage does")
        return self.stack.logits(hidden_RE).to(torch.promote_types(self.dtype, torch.float32))


def _stack(config: ModelConfig, layers: range, storage: Storage) -> StageLayers:
    if isinstance(config, DecoderConfig):
        return DecoderLayers(config, layers, storage)
    from pipedec.model.module_layers import ModuleLayers  # transformers takes two seconds to import

    assert isinstance(config, TransformersConfig)
    return ModuleLayers(config, layers, storage)


def _suits_tables(config: ModelConfig) -> bool:
    """Whether no layer caches latents."""
    return all(layer.latents is None for layer in config.attention_layers)


def _suits_flash(config: ModelConfig) -> bool:
    """Whether flash-attention can read the caches of all layers."""
    layers = config.attention_layers
    in_chunks = any(layer.reach is not None and layer.reach.is_chunk for layer in layers)
    return not in_chunks and all(layer.latents is None and layer.key_dim == layer.value_dim for layer in layers)
