"""The weights of a checkpoint, in safetensors files or a GGUF file: which tensors a stage needs, and reading only those.

Knows file formats and tensor names, but not how the tensors are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipedec.checkpoints import SINGLE_FILE, LayerSpan, TensorFiles, span_shapes
from pipedec.checkpoints.parts import EMBEDDING, FINAL_NORM, HEAD, head_name
from pipedec.config import ModelConfig
from pipedec.core import UserError

__all__ = ["EMBEDDING", "FINAL_NORM", "HEAD", "SINGLE_FILE", "Checkpoint", "Destination"]

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
CHUNK = 1 << 20  # values that are de-quantised at once

Shape = tuple[int, ...]


class Destination(Protocol):
    """The target of a tensor that is read: a preallocated one, or a matrix that rounds what it gets."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, rows: slice, /) -> Any:
        """A view of some rows, a destination too."""

    def copy_(self, weight: Tensor, /) -> Any:
        """Take over the values of a tensor of the same shape."""


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
        """Check that the checkpoint holds a floating-point tensor of this name and shape.

        Raises:
            UserError: it does not; the message names the tensor, and the expected and actual shape.
        """
        self._files.check_here([name])
        place = self._files.places[name]
        if self._files.gguf is None and place.dtype not in FLOAT_DTYPES:
            raise UserError(f"{place.file}: tensor {name} has dtype {place.dtype}; use an unquantized checkpoint")
        if place.shape != shape:
            raise UserError(f"{place.file}: tensor {name} has shape {list(place.shape)}, but config.json asks for {list(shape)}")

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

    def _copy(self, name: str, target: Destination) -> None:
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
