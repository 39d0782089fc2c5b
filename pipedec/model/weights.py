"""The tensors of a checkpoint, of safetensors files or a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipedec.checkpoints import LayerSpan, TensorFiles, span_shapes
from pipedec.core.errors import UserError
from pipedec.families import ModelConfig, Shape
from pipedec.formats import PLAIN, FileTensor, Format, file_names, full_name, is_stack, own_suffix
from pipedec.model.experts import ExpertMatrices
from pipedec.model.matrices import DenseMatrix, Matrix

CHUNK_VALUES = 1 << 22  # weights that are read at once, if their format allows that
_CHUNK_STEP = 128  # outputs: parts of a matrix begin at a multiple of it

_MAPPED_BYTES = 1 << 26  # that may be read from a file before it is mapped again: pages that were read stay resident until then

Target = Tensor | Matrix | ExpertMatrices  # a tensor that is no matrix of a linear map, such a matrix, or a stack of them


class Checkpoint:
    """The tensors of a checkpoint. Only the headers of the files that are here are read.

    Args:
        model: the directory of a Hugging Face checkpoint, or a GGUF file.

    Raises:
        UserError: as ``TensorFiles``.
    """

    def __init__(self, model: str | Path) -> None:
        self._files, self._opened = TensorFiles(model), _OpenFile()

    def __contains__(self, name: str) -> bool:
        return name in self._files.file_of

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._files.file_of.keys()

    def format_of(self, config: ModelConfig, name: str, shape: Shape) -> Format:
        """The format of a tensor of the model in the checkpoint. Raises UserError if the sizes or types do not suit."""
        return self._files.format_of(config.formats, name, shape)

    def check_complete(self, config: ModelConfig, is_part: bool = False) -> None:
        """Check that the checkpoint holds every tensor of the model with its shape, and no others.

        Args:
            is_part: whether files may be missing; their tensors are then checked by name alone.

        Raises:
            UserError: a tensor is missing, has the wrong shape or dtype, or is not part of the model.
        """
        files = self._files
        whole = LayerSpan(range(config.num_hidden_layers), first=True, last=True)
        elsewhere = files.file_of.keys() - files.places.keys() if is_part else set()
        expected: set[str] = set()
        unused: set[str] = set()
        for name, shape in span_shapes(config, whole, files.file_of).items():
            format = self.format_of(config, name, shape)
            stored = self._stored(name, format, shape)
            for one, tensor in stored.items():
                if one not in elsewhere and not (tensor.is_optional and one not in self):
                    self.check_tensor(one, tensor)
            expected.update(stored)
            unused.update(full_name(name, suffix) for suffix in format.unused)
        for name in (unused - expected) & files.places.keys():
            self._check_unused(name)
        known = expected | unused
        for name in files.file_of:
            if name not in known and not config.ignores(name):
                raise UserError(
                    f"{files.file_of[name]}: tensor {name} is not part of this {config.model_type} model: "
                    "config.json and the weights do not belong together"
                )

    def _check_unused(self, name: str) -> None:
        """Raises UserError for a bias that is not 0: some programs write one for every matrix."""
        if not name.endswith(".bias"):
            return
        place = self._files.places[name]
        found = self._read(name, FileTensor((place.dtype,), place.shape, None), slice(0))
        self._opened.close()
        if bool(found.any()):
            raise UserError(f"{place.file}: tensor {name} is not 0, though this model has no such bias by its config.json")

    def check_tensor(self, name: str, expected: FileTensor) -> None:
        """Raises UserError, with the expected and actual shape, unless the checkpoint has such a tensor."""
        self._files.check_here([name])
        place = self._files.places[name]
        if place.dtype not in expected.dtypes and not self._is_widened(place.dtype, expected):
            known = " or ".join(expected.dtypes)
            what = "use an unquantized checkpoint" if expected == PLAIN.tensors(expected.shape)["weight"] else f"not {known}"
            raise UserError(f"{place.file}: tensor {name} has dtype {place.dtype}; {what}")
        if not expected.suits(place.shape):
            raise UserError(
                f"{place.file}: tensor {name} has shape {list(place.shape)}, but config.json asks for {list(expected.shape)}"
            )

    def _is_widened(self, dtype: str, expected: FileTensor) -> bool:
        """Whether a quantized tensor of a GGUF file is widened as it is read, where a plain one is asked for (``--quantize``)."""
        return self._files.gguf is not None and "F32" in expected.dtypes

    def read_into(self, targets: Mapping[str, Target], progress: Callable[[], None] | None = None) -> None:
        """Copy tensors to their destinations (which may be views), converting to their dtype and device.

        Files are mapped again and again, so that apart from the targets little is resident.

        Args:
            targets: by name; their shapes are the expected ones.
            progress: called after each tensor.

        Raises:
            UserError: a tensor is missing, or has the wrong shape or dtype.
        """
        stored = {name: self._stored(name, _format(target), tuple(target.shape)) for name, target in targets.items()}
        for tensors in stored.values():
            for one, tensor in tensors.items():
                if not (tensor.is_optional and one not in self):
                    self.check_tensor(one, tensor)
        try:
            for name, target in targets.items():
                self._fill(name, target, stored[name])
                if progress is not None:
                    progress()
        finally:
            self._opened.close()

    def _fill(self, name: str, target: Target, stored: Mapping[str, FileTensor]) -> None:
        """Part by part."""
        here = {one: tensor for one, tensor in stored.items() if one in self}
        if isinstance(target, ExpertMatrices):
            is_turned = self._is_turned(name, target.format, tuple(target.shape), target.is_transposed)
            for expert, matrix in enumerate(target.matrices):
                own = {own_suffix(name, one): self._read_expert(one, tensor, expert) for one, tensor in here.items()}
                matrix.fill({suffix: one.mT if is_turned and one.dim() == 2 else one for suffix, one in own.items()})
            return
        if isinstance(target, Tensor) and target.dim() == 2:
            target = DenseMatrix(target)
        if isinstance(target, Tensor):
            ((one, tensor),) = here.items()
            target.copy_(self._read(one, tensor, slice(0, target.shape[0]) if target.shape else None))
            return
        outputs, inputs = target.shape
        whole = math.lcm(_CHUNK_STEP, *(tensor.per_output.denominator for tensor in here.values()))
        step = max(CHUNK_VALUES // inputs // whole, 1) * whole
        for first in range(0, outputs, step):
            part = slice(first, min(first + step, outputs))
            found = {own_suffix(name, one): self._read(one, tensor, part) for one, tensor in here.items()}
            try:
                target[part].fill(found)
            except UserError as error:
                raise UserError(f"{self._files.file_of[next(iter(here))]}: tensor {name}: {error}") from None

    def _read(self, name: str, tensor: FileTensor, outputs: slice | None) -> Tensor:
        """The part of a tensor that belongs to some outputs; a tensor without dimensions as a whole."""
        file, index = self._files.file_of[name], self._files.gguf
        if index is not None:
            rows = () if outputs is None or len(tensor.shape) < 2 else (outputs.start, outputs.stop)
            return torch.from_numpy(index.read(name, *rows) if "F32" in tensor.dtypes else index.raw(name, *rows))
        return self._opened.read(file, name, None if outputs is None else tensor.places(outputs))

    def _stored(self, name: str, format: Format, shape: Shape) -> dict[str, FileTensor]:
        """The tensors of the file that make one of the model (see ``file_names``)."""
        is_turned = self._is_turned(name, format, shape)
        return file_names(name, format, (shape[0], shape[2], shape[1]) if is_turned else shape)

    def _is_turned(self, name: str, format: Format, shape: Shape, in_doubt: bool = False) -> bool:
        """Whether a stack of matrices [E, N, K] is in the file as [E, K, N], which is never so in GGUF.

        ``in_doubt``: the answer for N = K.
        """
        if self._files.gguf is not None or not is_stack(name, shape) or not format.is_turnable:
            return False
        experts, outputs, inputs = shape
        place = self._files.places.get(name)
        return in_doubt if outputs == inputs else place is not None and place.shape == (experts, inputs, outputs)

    def _read_expert(self, name: str, tensor: FileTensor, expert: int) -> Tensor:
        """The part of a stack that belongs to an expert."""
        if self._files.gguf is not None:
            return self._read(name, tensor, slice(expert, expert + 1))[0]
        return self._opened.read(self._files.file_of[name], name, (slice(expert, expert + 1),))[0]


class _OpenFile:
    """The safetensors file from which tensors are read at the moment."""

    def __init__(self) -> None:
        self._stack, self._path, self._handle, self._num_bytes = ExitStack(), Path(), cast(Any, None), 0

    def read(self, file: Path, name: str, places: tuple[slice, ...] | None) -> Tensor:
        """A tensor, or a part of it. Raises UserError for a damaged file."""
        try:
            if file != self._path or self._num_bytes > _MAPPED_BYTES:
                self.close()
                self._handle, self._path = self._stack.enter_context(safe_open(str(file), framework="pt")), file
            found: Tensor = self._handle.get_tensor(name) if places is None else self._handle.get_slice(name)[places]
        except SafetensorError as error:
            raise UserError(f"{file} is not a whole safetensors file ({error}); download it again") from None
        self._num_bytes += found.nbytes
        return found

    def close(self) -> None:
        self._stack.close()
        self._path, self._handle, self._num_bytes = Path(), None, 0


def _format(target: Target) -> Format:
    return PLAIN if isinstance(target, Tensor) else target.format
