"""Where the tensors of a GGUF file are, by their names in a Hugging Face checkpoint, and their values row by row.

The index of a whole model in one file is in the cache (``files``). A checkpoint's directory may have one, too, if its weights are
in GGUF's quantized formats: ``write_quantized``. Quantising and de-quantising are the ``gguf`` library's. Shapes: R rows of C
values; a vector is one row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedec.core.errors import UserError
from pipedec.gguf.architectures import Architecture
from pipedec.gguf.orders import BlockOrder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

INDEX_FILE = "gguf.json"
WEIGHTS_FILE = "model.gguf"  # its name in a checkpoint's directory
BLOCKS = {
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "MXFP4": (32, 17),
}  # fmt: skip
"""Types of quantized matrices: how many values of a row form a block, and its bytes."""
TYPES = ("F32", "F16", "BF16", *BLOCKS)


@dataclass(frozen=True)
class TensorPlace:
    """One tensor in the file.

    Attributes:
        type: of its values in the file, one of TYPES.
        shape: as in the checkpoint: [R, C], [R, 1, C], or [E, R, C] of a stack of E matrices; [C], or [].
        offset: its first byte in the file.
        num_bytes: its size in the file.
        rows: the order of the rows of a matrix, or the values of a vector; None if it is the checkpoint's.
        columns: the same of columns.
        added: to all values, to get those of the checkpoint.
        is_decay: whether the file has -exp(x) of the checkpoint's values x.
        rest: the place of further rows, if they are another tensor in the file.
        turns: how many rows are here and how many in ``rest``, in turn; ``rows`` is the order of those that are here.
        row_values: the values of a row, if they are not all of the last dimension.
    """

    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    rows: BlockOrder | None = None
    columns: BlockOrder | None = None
    added: float = 0.0
    is_decay: bool = False
    rest: TensorPlace | None = None
    turns: tuple[int, int] = (1, 0)
    row_values: int | None = None

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TensorPlace:
        """The place that ``asdict`` has written."""
        known = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        orders = {
            name: BlockOrder(found["size"], tuple(found["places"]))
            for name in ("rows", "columns")
            if (found := known.get(name)) is not None
        }
        rest = known.get("rest")
        rest = None if rest is None else cls.from_document(rest)
        tuples: dict[str, Any] = {name: tuple(known[name]) for name in ("shape", "turns") if name in known}
        return cls(**{**known, **tuples, "rest": rest, **orders})

    @property
    def read_type(self) -> str:
        """The type of its values as a checkpoint's: F32 if blocks have to be widened, because their columns do not stay together
        or its parts have different types.
        """
        is_cut = self.columns is not None and self.type in BLOCKS and self.columns.size % BLOCKS[self.type][0]
        return "F32" if is_cut or (self.rest is not None and self.rest.type != self.type) else self.type

    @property
    def num_rows(self) -> int:
        """Rows of a matrix, or of all those of a stack; 1 for a vector or a number."""
        last = self.shape[-1] if self.shape else 1
        return math.prod(self.shape) // (last if self.row_values is None else self.row_values)

    @property
    def rows_here(self) -> int:
        """Those that are not in ``rest``."""
        return self.num_rows // sum(self.turns) * self.turns[0]

    def own_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For rows of the checkpoint that are not in ``rest``, by their number among those, their places in the file."""
        if self.rows is None or len(self.shape) < 2:
            return rows
        return self.rows.indices(self.rows_here)[rows]


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
            places = {name: TensorPlace.from_document(place) for name, place in document["tensors"].items()}
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
        """Rows ``first`` up to ``last`` of a matrix, float32 [rows, C] or [rows, 1, C], or matrices of a stack, [matrices, R, C];
        a vector as a whole, [C], a number, [].

        Raises UserError as ``raw``.
        """
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        place = self.tensors[name]
        values = self._rows(place, first, last, lambda rows, kind: dequantize(rows, GGMLQuantizationType[kind]))
        is_matrix = len(place.shape) > 1
        values = values.reshape((-1, *place.shape[1:]) if is_matrix else place.shape)
        if place.rows is not None and not is_matrix:
            values = values[place.rows.indices(len(values))]
        if place.columns is not None:
            values = values[..., place.columns.indices(values.shape[-1])]
        values = np.log(-values) if place.is_decay else values
        return values + np.float32(place.added) if place.added else values

    def raw(self, name: str, first: int = 0, last: int | None = None) -> npt.NDArray[np.uint8]:
        """A copy of rows ``first`` up to ``last`` of a matrix whose blocks stay as they are, uint8 [rows, bytes of a row], or of
        matrices of a stack, [matrices, R, bytes of a row], in the order of the checkpoint; what is no matrix is one row, in that
        of the file.

        Raises UserError if the file cannot be read, or is shorter than it was.
        """
        place = self.tensors[name]
        rows: npt.NDArray[np.uint8] = self._rows(place, first, last, lambda rows, _: rows)
        if place.columns is not None:
            num_bytes = place.columns.size * rows.shape[1] // place.shape[-1]
            rows = rows[:, BlockOrder(num_bytes, place.columns.places).indices(rows.shape[1])]
        return rows.reshape(-1, *place.shape[1:-1], rows.shape[1])

    def _rows(
        self, place: TensorPlace, first: int, last: int | None, convert: Callable[[npt.NDArray[np.uint8], str], npt.NDArray[Any]]
    ) -> npt.NDArray[Any]:
        """Converted rows of a matrix, or of a stack's matrices, in the order of the checkpoint, with columns in that of the file.

        ``convert``: from bytes, [rows, bytes of a row], and their type.
        """
        import numpy as np

        length = place.shape[0] if len(place.shape) > 1 else 1
        first, last, _ = slice(first, last).indices(length)
        rows = np.arange(first * place.num_rows // length, last * place.num_rows // length)
        if place.rest is None:
            return convert(self._mapped(place)[place.own_rows(rows)], place.type)
        here, there = place.turns
        turn, within = np.divmod(rows, here + there)
        is_here = within < here
        parts = ((is_here, place, turn * here + within), (~is_here, place.rest, turn * there + within - here))
        found = [
            (chosen, convert(self._mapped(part)[part.own_rows(own[chosen])], part.type))
            for chosen, part, own in parts
            if chosen.any()
        ]
        result = np.empty((len(rows), found[0][1].shape[1]), found[0][1].dtype)
        for chosen, values in found:
            result[chosen] = values
        return result

    def _mapped(self, place: TensorPlace) -> npt.NDArray[np.uint8]:
        """The bytes of all rows in the file, without those of ``rest``. Raises UserError as ``raw``."""
        import numpy as np

        shape = place.rows_here, place.num_bytes // place.rows_here
        try:
            return np.memmap(self.file, np.uint8, "r", place.offset, shape).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.file} cannot be read ({error}); download it again") from None


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
    names = {f"{name}.{kind}": f"{module}.{kind}" for name, module in named.items() if name for kind in ("weight", "bias")}
    parameters = architecture.parameters.items()
    return names | {
        f"blk.{layer}.{own}": f"{base}.layers.{layer}.{parameter}" for layer in range(num_layers) for parameter, own in parameters
    }
