"""The weights of a checkpoint (safetensors files or a GGUF file), and those of one stage, quantized and packed as they are read.

Knows no activations. ``load_transformers`` makes the model of transformers: to train, to learn from, to compare with. Shapes as
in ``stage_model``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipedec.checkpoints import LayerSpan, TensorFiles, span_shapes
from pipedec.checkpoints.parts import EMBEDDING, FINAL_NORM, HEAD, head_name
from pipedec.config import ModelConfig
from pipedec.core import UserError
from pipedec.gguf import model_files
from pipedec.model.matrices import EMPTY_MATRICES, Int8Matrix, Matrix, QuantizedMatrix, pack, pays

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
CHUNK = 1 << 20  # values that are de-quantised at once

Shape = tuple[int, ...]


class Checkpoint:
    """The tensors of a checkpoint. Only the headers of the files that are here are read.

    Args:
        model: the directory of a Hugging Face checkpoint, or a GGUF file.

    Raises:
        UserError: as ``TensorFiles``.
    """

    def __init__(self, model: str | Path) -> None:
        self._files = TensorFiles(model)

    def __contains__(self, name: str) -> bool:
        return name in self._files.file_of

    def expected_shapes(self, config: ModelConfig, layers: range, first: bool, last: bool) -> dict[str, Shape]:
        """Name and shape of every tensor that a stage needs, in the order of the model.

        The first stage holds the embedding, the last one the final norm and the head. If the head is tied and the checkpoint has
        no tensor for it, the last stage needs the embedding.
        """
        return span_shapes(config, LayerSpan(layers, first, last), self._files.file_of)

    def head_name(self, config: ModelConfig) -> str:
        """Name of the head's tensor: the embedding if the config ties them and the checkpoint has no separate head."""
        return head_name(config, self._files.file_of)

    def check_complete(self, config: ModelConfig, is_part: bool = False) -> None:
        """Check that the checkpoint holds every tensor of the model with its shape, and no others.

        Args:
            is_part: whether files may be missing; their tensors are then checked by name alone.

        Raises:
            UserError: a tensor is missing, has the wrong shape or dtype, or is not part of the model.
        """
        files = self._files
        expected = self.expected_shapes(config, range(config.num_layers), first=True, last=True)
        elsewhere = files.file_of.keys() - files.places.keys() if is_part else set()
        for name, shape in expected.items():
            if name not in elsewhere:
                self.check_tensor(name, shape)
        for name in files.file_of:
            if name not in expected and not name.endswith(".rotary_emb.inv_freq"):
                raise UserError(
                    f"{files.file_of[name]}: tensor {name} is not part of this {config.model_type} model: "
                    "config.json and the weights do not belong together"
                )

    def check_tensor(self, name: str, shape: Shape) -> None:
        """Raises UserError, with the expected and actual shape, unless the checkpoint has such a floating-point tensor."""
        self._files.check_here([name])
        place = self._files.places[name]
        if self._files.gguf is None and place.dtype not in FLOAT_DTYPES:
            raise UserError(f"{place.file}: tensor {name} has dtype {place.dtype}; use an unquantized checkpoint")
        if place.shape != shape:
            raise UserError(f"{place.file}: tensor {name} has shape {list(place.shape)}, but config.json asks for {list(shape)}")

    def read_into(self, targets: Mapping[str, Matrix], progress: Callable[[], None] | None = None) -> None:
        """Copy tensors to their destinations (which may be views), converting to their dtype and device.

        The file is mapped again for every tensor, so that apart from the targets at most one tensor is resident; of a GGUF file
        at most some of its rows.

        Args:
            targets: by name; their shapes are the expected ones.
            progress: called after each tensor.

        Raises:
            UserError: a tensor is missing, or has the wrong shape or dtype.
        """
        for name, target in targets.items():
            self.check_tensor(name, tuple(target.shape))
        for name, target in targets.items():
            self._copy(name, target)
            if progress is not None:
                progress()

    def _copy(self, name: str, target: Matrix) -> None:
        file, index = self._files.file_of[name], self._files.gguf
        if index is None:
            try:
                with safe_open(str(file), framework="pt") as opened:
                    target.copy_(opened.get_tensor(name))
            except SafetensorError as error:
                raise UserError(f"{file} is not a whole safetensors file ({error}); download it again") from None
        elif len(target.shape) == 1:
            target.copy_(torch.from_numpy(index.read(name)))
        else:
            rows = max(CHUNK // target.shape[1], 1)
            for first in range(0, target.shape[0], rows):
                target[first : first + rows].copy_(torch.from_numpy(index.read(name, first, first + rows)))


@torch.no_grad()
def load_transformers(model: Path, dtype: torch.dtype, device: torch.device | str = "cpu", **options: Any) -> Any:
    """A causal language model, not in training mode.

    Args:
        model: the directory of a checkpoint, or a GGUF file, which is de-quantised.
        options: for ``from_pretrained`` or ``from_config``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if TensorFiles(model).gguf is None:
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True, **options).to(device).eval()
    directory = model_files(model)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype, **options)
    checkpoint = Checkpoint(model)
    checkpoint.read_into({name: tensor for name, tensor in made.state_dict().items() if name != HEAD or HEAD in checkpoint})
    made.tie_weights()
    made.generation_config = GenerationConfig.from_pretrained(directory)
    return made.to(device).eval()


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
        embedding_VE: on the first stage, else None.
        final_norm_E, head_VE: on the last stage, else None.

    Raises:
        UserError: the sizes of the matrices do not allow ``quantize`` (see ``StageModel``).
    """

    def __init__(
        self, config: ModelConfig, layers: range, dtype: torch.dtype, device: torch.device, quantize: str | None = None
    ) -> None:
        self._config, self._numbers = config, layers
        self._dtype, self._device, self._quantize = dtype, device, quantize
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
        """Read them, one tensor at a time, quantized as they are read. Raises UserError for an incomplete or damaged checkpoint.

        A layer's matrices are packed as soon as they are complete, and the next ones read in their place. ``progress`` is called
        with (tensors read, tensors in total) after each tensor.
        """
        head_name, is_first, is_last = checkpoint.head_name(self._config), self.embedding_VE is not None, self.head_VE is not None
        if is_first and is_last and head_name == EMBEDDING:
            self.head_VE = self.embedding_VE
        names = list(checkpoint.expected_shapes(self._config, self._numbers, is_first, is_last))
        num_read, matrices = count(1), dict[str, Tensor]()
        for layer, group in groupby(names, _layer_of):
            weights = None if layer is None else replace(self.layers[layer - self._numbers.start], **matrices)
            if weights is None:
                edges = ((EMBEDDING, self.embedding_VE), (FINAL_NORM, self.final_norm_E), (head_name, self.head_VE))
                targets: dict[str, Matrix] = {name: weight for name, weight in edges if weight is not None}
            else:
                targets = self._layer_targets(f"model.layers.{layer}.", weights)
            checkpoint.read_into({name: targets[name] for name in group}, lambda: progress(next(num_read), len(names)))
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
