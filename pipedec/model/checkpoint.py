"""The weights of a checkpoint, in safetensors files or a GGUF file: where each tensor is, which ones a stage needs, and reading
only those.

Knows file formats and tensor names, but not how the tensors are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipedec.config import ModelConfig
from pipedec.core import UserError
from pipedec.gguf import INDEX_FILE as GGUF_INDEX
from pipedec.gguf import TensorIndex, model_files

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
CHUNK = 1 << 20  # values that are de-quantised at once

Shape = tuple[int, ...]


class Destination(Protocol):
    """What a tensor is read into: a preallocated one, or a matrix that rounds what it gets."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, rows: slice, /) -> Any:
        """A view of some rows, a destination too."""

    def copy_(self, weight: Tensor, /) -> Any:
        """Take over the values of a tensor of the same shape."""


class Checkpoint:
    """The file, shape and dtype of every tensor of a checkpoint. Only the headers are read.

    Args:
        model: the directory of a Hugging Face checkpoint, or a GGUF file.

    Raises:
        UserError: there are no safetensors weights, a shard is missing, truncated or not in safetensors format, or the index
            does not match its shards.
    """

    def __init__(self, model: str | Path) -> None:
        self.directory = model_files(model)
        self._index = TensorIndex.load(self.directory) if (self.directory / GGUF_INDEX).exists() else None
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        index = self.directory / INDEX_FILE
        if self._index is not None:
            self._register(self._index)
        elif (self.directory / SINGLE_FILE).exists():
            self._read_header(self.directory / SINGLE_FILE)
        elif index.exists():
            self._read_index(index)
        elif any(self.directory.glob("*.bin")) or any(self.directory.glob("*.pth")):
            raise UserError(
                f"{self.directory} holds only pickle weights; convert them to safetensors "
                "(transformers: model.save_pretrained(folder, safe_serialization=True))"
            )
        else:
            raise UserError(f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}: give a Hugging Face checkpoint")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor_names(self, config: ModelConfig, layers: range, first: bool, last: bool) -> list[str]:
        """Names of the tensors that a stage needs, in the order of the model. Arguments as in ``expected_shapes``."""
        return list(self.expected_shapes(config, layers, first, last))

    def expected_shapes(self, config: ModelConfig, layers: range, first: bool, last: bool) -> dict[str, Shape]:
        """Name and shape of every tensor that a stage needs.

        Args:
            first: whether it is the first stage, which holds the embedding.
            last: whether it is the last stage, which holds the final norm and the head. If the head is tied and the
                checkpoint has no tensor for it, the last stage needs the embedding.
        """
        shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)} if first else {}
        for layer in layers:
            shapes.update(_layer_shapes(config, layer))
        if last:
            shapes[FINAL_NORM] = (config.hidden_size,)
            shapes[self.head_name(config)] = (config.vocab_size, config.hidden_size)
        return shapes

    def head_name(self, config: ModelConfig) -> str:
        """Name of the head's tensor: the embedding if the config ties them and the checkpoint has no separate head."""
        return EMBEDDING if config.tie_word_embeddings and HEAD not in self._files else HEAD

    def check_complete(self, config: ModelConfig) -> None:
        """Check that the checkpoint holds every tensor of the model with its shape, and no others.

        Raises:
            UserError: a tensor is missing, has the wrong shape or dtype, or is not part of the model.
        """
        expected = self.expected_shapes(config, range(config.num_layers), first=True, last=True)
        for name, shape in expected.items():
            self.check_tensor(name, shape)
        for name in self._files:
            if name not in expected and not name.endswith(".rotary_emb.inv_freq"):
                raise UserError(
                    f"{self._files[name]}: tensor {name} is not part of this {config.model_type} model: "
                    "config.json and the weights do not belong together"
                )

    def check_tensor(self, name: str, shape: Shape) -> None:
        """Check that the checkpoint holds a floating-point tensor of this name and shape.

        Raises:
            UserError: it does not; the message names the tensor, and the expected and actual shape.
        """
        if name not in self._files:
            origin = self.directory if self._index is None else self._index.file
            raise UserError(f"{origin}: tensor {name} is missing from the checkpoint; download it again")
        if self._index is None and self._dtypes[name] not in FLOAT_DTYPES:
            raise UserError(f"{self._files[name]}: tensor {name} has dtype {self._dtypes[name]}; use an unquantized checkpoint")
        if self._shapes[name] != shape:
            raise UserError(
                f"{self._files[name]}: tensor {name} has shape {list(self._shapes[name])}, but config.json asks for {list(shape)}"
            )

    def read_into(self, targets: Mapping[str, Destination], progress: Callable[[int, int], None] | None = None) -> None:
        """Copy tensors to their destinations (which may be views), converting to their dtype and device.

        The file is mapped again for every tensor, so that apart from the targets at most one tensor is resident; of a GGUF file
        at most some of its rows.

        Args:
            targets: destination of every tensor, by name. Its shape is the expected one.
            progress: called with (tensors read, tensors in total) after each tensor.

        Raises:
            UserError: a tensor is missing, or has the wrong shape or dtype.
        """
        for name, target in targets.items():
            self.check_tensor(name, tuple(target.shape))
        for done, (name, target) in enumerate(targets.items(), start=1):
            self._copy(name, target)
            if progress is not None:
                progress(done, len(targets))

    def first_rows(self) -> Iterator[tuple[str, Shape, Tensor]]:
        """Name, shape and first row (of a vector, all of it) of every tensor, in alphabetical order."""
        for name in sorted(self._files):
            if self._index is not None:
                yield name, self._shapes[name], torch.from_numpy(self._index.read(name, 0, 1))
                continue
            with safe_open(str(self._files[name]), framework="pt") as file:
                part = file.get_slice(name)
                yield name, self._shapes[name], part[:1] if len(self._shapes[name]) > 1 else part[:]

    def _copy(self, name: str, target: Destination) -> None:
        if self._index is None:
            with safe_open(str(self._files[name]), framework="pt") as file:
                target.copy_(file.get_tensor(name))
        elif len(target.shape) == 1:
            target.copy_(torch.from_numpy(self._index.read(name)))
        else:
            rows = max(CHUNK // target.shape[1], 1)
            for first in range(0, target.shape[0], rows):
                target[first : first + rows].copy_(torch.from_numpy(self._index.read(name, first, first + rows)))

    def _register(self, index: TensorIndex) -> None:
        for name, place in index.tensors.items():
            self._files[name], self._shapes[name], self._dtypes[name] = index.file, place.shape, place.type

    def _read_index(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index} is not a safetensors index; download it again") from None
        for shard in shards:
            self._read_header(self.directory / str(shard))
        for name, shard in weight_map.items():
            if self._files.get(name) != self.directory / shard:
                raise UserError(f"{self.directory / shard}: tensor {name} is missing, though {INDEX_FILE} names it here")

    def _read_header(self, file: Path) -> None:
        """Register the tensors of one file. safetensors checks the header and the file's size against it."""
        if not file.is_file():
            raise UserError(f"{file} is missing; download the checkpoint again")
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the handle is not a mapping
                    part = opened.get_slice(name)
                    self._files[name] = file
                    self._shapes[name] = tuple(part.get_shape())
                    self._dtypes[name] = part.get_dtype()
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{file} is not a whole safetensors file ({reason}); download it again") from None


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Names and shapes of one transformer layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    prefix = f"model.layers.{layer}."
    projections = (
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    shapes: dict[str, Shape] = {prefix + "input_layernorm.weight": (hidden,)}
    for projection, outputs, inputs, bias in projections:
        shapes[f"{prefix}{projection}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{prefix}{projection}.bias"] = (outputs,)
    if config.qk_norm:
        shapes.update({f"{prefix}self_attn.{norm}.weight": (config.head_dim,) for norm in ("q_norm", "k_norm")})
    shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    return shapes
