"""The tensors of a checkpoint, of safetensors files or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pipedec.checkpoints import LayerSpan, TensorFiles, span_shapes
from pipedec.core.errors import UserError
from pipedec.families import ModelConfig, Shape
from pipedec.model.matrices import Matrix

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
CHUNK = 1 << 20  # values that are de-quantised at once


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

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._files.file_of.keys()

    def check_complete(self, config: ModelConfig, is_part: bool = False) -> None:
        """Check that the checkpoint holds every tensor of the model with its shape, and no others.

        Args:
            is_part: whether files may be missing; their tensors are then checked by name alone.

        Raises:
            UserError: a tensor is missing, has the wrong shape or dtype, or is not part of the model.
        """
        files = self._files
        whole = LayerSpan(range(config.num_hidden_layers), first=True, last=True)
        expected = span_shapes(config, whole, files.file_of)
        elsewhere = files.file_of.keys() - files.places.keys() if is_part else set()
        for name, shape in expected.items():
            if name not in elsewhere:
                self.check_tensor(name, shape)
        for name in files.file_of:
            if name not in expected and not config.ignores(name):
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
        elif len(target.shape) < 2:
            target.copy_(torch.from_numpy(index.read(name)))
        else:
            rows = max(CHUNK // target.shape[1], 1)
            for first in range(0, target.shape[0], rows):
                target[first : first + rows].copy_(torch.from_numpy(index.read(name, first, first + rows)))
