"""Where the tensors of a GGUF file are, by their names in a Hugging Face checkpoint, and their values row by row.

The index of a whole model in one file is in the cache (``files``). A checkpoint's directory may have one, too, if its weights are
in GGUF's quantized formats: ``write_quantized``. Quantising and de-quantising are the ``gguf`` library's. Shapes: R rows of C
values; a vector is one row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipedec.core.errors import UserError
from pipedec.gguf.config import Architecture

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

INDEX_FILE = "gguf.json"
WEIGHTS_FILE = "model.gguf"  # its name in a checkpoint's directory
BLOCKS = {
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""Types of quantized matrices: how many values of a row form a block, and its bytes."""
TYPES = ("F32", "F16", "BF16", *BLOCKS)


@dataclass(frozen=True)
class TensorPlace:
    """One tensor in the file.

    Attributes:
        type: of its values, one of TYPES.
        shape: as in the checkpoint: [R, C], [C], or [].
        offset: its first byte in the file.
        num_bytes: its size in the file.
        heads: llama.cpp keeps the two halves of each of so many heads interleaved, row by row; 0 if the rows are in order.
        parts: if not 0, llama.cpp instead keeps so many parts of all heads one after another, which the checkpoint has in turn
            for each head.
        added: to all values, to get those of the checkpoint.
    """

    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    heads: int = 0
    parts: int = 0
    added: float = 0.0


@dataclass(frozen=True)
class TensorIndex:
    """All tensors of one GGUF file."""

    file: Path
    tensors: dict[str, TensorPlace]

    @classmethod
    def load(cls, directory: Path) -> TensorIndex:
        """The index in ``directory``, which names a file there or elsewhere. Raises UserError if it is damaged."""
        path = directory / INDEX_FILE
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            found = document["tensors"].items()
            places = {name: TensorPlace(**{**place, "shape": tuple(place["shape"])}) for name, place in found}
            return cls(directory / document["file"], places)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is no index of a GGUF file ({error}); copy the checkpoint again") from None

    @classmethod
    def found(cls, directory: Path) -> TensorIndex | None:
        """As ``load``; None if ``directory`` has no index."""
        return cls.load(directory) if (directory / INDEX_FILE).exists() else None

    def save(self, directory: Path) -> None:
        file = self.file.name if self.file.parent == directory else str(self.file)
        document = {"file": file, "tensors": {name: asdict(place) for name, place in self.tensors.items()}}
        (directory / INDEX_FILE).write_text(json.dumps(document), encoding="utf-8")

    def read(self, name: str, first: int = 0, last: int | None = None) -> npt.NDArray[np.float32]:
        """Rows ``first`` up to ``last`` of a matrix, float32 [rows, C]; a vector as a whole, [C], and a number, [].

        Raises UserError as ``raw``.
        """
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        place = self.tensors[name]
        values = dequantize(self.raw(name, first, last), GGMLQuantizationType[place.type])
        if len(place.shape) < 2:
            values = values[0, _order(place)] if place.shape else values.reshape(())
        return values + np.float32(place.added) if place.added else values

    def raw(self, name: str, first: int = 0, last: int | None = None) -> npt.NDArray[np.uint8]:
        """A copy of rows ``first`` up to ``last`` of a matrix as they are in the file, uint8 [rows, bytes of a row], in the order
        of the checkpoint; what is no matrix is one row, in that of the file.

        Raises UserError if the file cannot be read, or is shorter than it was.
        """
        import numpy as np

        place = self.tensors[name]
        is_matrix = len(place.shape) > 1
        num_rows = place.shape[0] if is_matrix else 1
        try:
            mapped = np.memmap(self.file, np.uint8, "r", place.offset, (num_rows, place.num_bytes // num_rows))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.file} cannot be read ({error}); download it again") from None
        rows = _order(place)[first:last] if is_matrix else np.zeros(1, np.int64)
        return mapped.view(np.ndarray)[rows]


def _order(place: TensorPlace) -> npt.NDArray[np.int64]:
    """For each row of a matrix, or value of a vector, its place in the file."""
    import numpy as np

    rows = np.arange(place.shape[0])
    if place.parts:
        return rows.reshape(place.parts, place.heads, -1).swapaxes(0, 1).reshape(-1)
    return rows.reshape(place.heads, -1, 2).swapaxes(1, 2).reshape(-1) if place.heads else rows


def write_quantized(directory: Path, tensors: Mapping[str, npt.NDArray[np.float32]], kind: str) -> None:
    """Write a checkpoint's weights to ``directory``, its matrices as ``kind`` (one of TYPES), vectors in float32.

    Matrices have rows of a multiple of 32 values.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import quantize

    path = directory / WEIGHTS_FILE
    writer = GGUFWriter(path, "llama")
    for name, values in tensors.items():
        chosen = GGMLQuantizationType[kind] if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(np.ascontiguousarray(values), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    places = {
        found.name: TensorPlace(
            found.tensor_type.name, tuple(map(int, reversed(found.shape))), int(found.data_offset), int(found.n_bytes)
        )
        for found in GGUFReader(path).tensors
    }
    TensorIndex(path, places).save(directory)


def tensor_names(name: str, architecture: Architecture, num_layers: int) -> dict[str, str]:
    """Names in a checkpoint, by names in a GGUF file. ``name``: of the architecture in GGUF."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    known = get_tensor_name_map(next(arch for arch, own in MODEL_ARCH_NAMES.items() if own == name), num_layers)
    base = architecture.base
    modules = [f"{base}.layers.{layer}.{module}" for layer in range(num_layers) for module in architecture.modules]
    modules += [f"{base}.{architecture.embedding}", f"{base}.{architecture.norm}", architecture.head]
    named = {known.get_name(module): module for module in modules}
    return {f"{name}.{kind}": f"{module}.{kind}" for name, module in named.items() if name for kind in ("weight", "bias")}
