"""Where the tensors of a checkpoint are: in which file, at which bytes. Reads headers alone, of the shards that are here.

A host of a cluster may hold only the shards that its ranks need, but always the index that names all of them.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipedec.core.errors import UserError
from pipedec.formats.base import DTYPE_BITS, Format, Formats, file_names, own_suffix
from pipedec.gguf import INDEX_FILE as GGUF_INDEX
from pipedec.gguf import TensorIndex, TensorPlace, model_files

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: ``num_bytes`` of ``dtype`` (as safetensors or GGUF name it) from ``offset`` on, then ``rest``."""

    name: str
    file: Path
    dtype: str
    shape: Shape
    offset: int
    num_bytes: int
    rest: StoredTensor | None = None

    @property
    def total_bytes(self) -> int:
        return self.num_bytes + (0 if self.rest is None else self.rest.total_bytes)


class TensorFiles:
    """The tensors of a Hugging Face checkpoint, or of a GGUF file: the file of each, and its place if the file is here.

    Attributes:
        directory: that of ``config.json``.
        gguf: the index of a GGUF file; None for safetensors.
        file_of: the file of every tensor by name, whether or not it is here.
        places: of the tensors whose files are here.

    Raises UserError if there is neither an index nor a single file, a shard is truncated or not in safetensors format, or the
    index does not match its shards.
    """

    def __init__(self, model: str | Path) -> None:
        self.directory = model_files(model)
        self.gguf = TensorIndex.found(self.directory)
        self.file_of: dict[str, Path] = {}
        self.places: dict[str, StoredTensor] = {}
        if self.gguf is not None:
            self._add(_in_gguf(name, self.gguf.file, place) for name, place in self.gguf.tensors.items())
        elif (self.directory / SINGLE_FILE).exists():
            self._add(read_header(self.directory / SINGLE_FILE))
        elif (self.directory / INDEX_FILE).exists():
            weight_map = read_weight_map(self.directory / INDEX_FILE)
            for shard in sorted(set(weight_map.values())):
                if (self.directory / shard).is_file():
                    self._add(read_header(self.directory / shard))
            for name, shard in weight_map.items():
                file = self.directory / shard
                if not file.is_file():
                    self.file_of.setdefault(name, file)
                if self.file_of.get(name) != file:
                    raise UserError(f"{file}: tensor {name} is missing, though {INDEX_FILE} names it here")
        elif any(self.directory.glob("*.bin")) or any(self.directory.glob("*.pth")):
            raise UserError(
                f"{self.directory} holds only pickle weights; convert them to safetensors "
                "(transformers: model.save_pretrained(folder, safe_serialization=True))"
            )
        else:
            raise UserError(f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}: give a Hugging Face checkpoint")

    @property
    def is_whole(self) -> bool:
        """Whether all files are here."""
        return len(self.places) == len(self.file_of)

    def format_of(self, formats: Formats, name: str, shape: Shape) -> Format:
        """The format of a tensor of the model in the checkpoint. Raises UserError if the sizes or types do not suit."""
        format = formats.of(name, shape, self.file_of)
        here = [one for one in file_names(name, format, shape) if one in self.places]
        return format.resolved({own_suffix(name, one): self.places[one].dtype for one in here})

    def check_here(self, names: Iterable[str]) -> None:
        """Raises UserError if a tensor among ``names`` is missing, or its file is not here."""
        for name in names:
            if name not in self.file_of:
                origin = self.directory if self.gguf is None else self.gguf.file
                raise UserError(f"{origin}: tensor {name} is missing from the checkpoint; download it again")
            if name not in self.places:
                raise UserError(f"{self.file_of[name]} is missing; download the checkpoint again")

    def _add(self, places: Iterable[StoredTensor]) -> None:
        for place in places:
            self.file_of[place.name], self.places[place.name] = place.file, place


def _in_gguf(name: str, file: Path, place: TensorPlace) -> StoredTensor:
    rest = None if place.rest is None else _in_gguf(name, file, place.rest)
    return StoredTensor(name, file, place.read_type, place.shape, place.offset, place.num_bytes, rest)


def known_files(directory: Path) -> TensorFiles | None:
    """The files of a checkpoint; None if it has none here, or damaged ones, which their reader reports. Headers are read again
    only after a file has changed.
    """
    files = sorted(file for pattern in (INDEX_FILE, GGUF_INDEX, "*.safetensors") for file in directory.glob(pattern))
    with suppress(UserError, OSError):
        return _read(directory, tuple((file, file.stat().st_mtime_ns) for file in files if file.is_file()))
    return None


@lru_cache(maxsize=8)
def _read(directory: Path, changed: tuple[tuple[Path, int], ...]) -> TensorFiles | None:
    return TensorFiles(directory) if changed else None


def read_weight_map(index: Path) -> dict[str, str]:
    """The file name of every tensor. Raises UserError for a damaged index."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        shards = {""}
    if not all(isinstance(shard, str) and shard == os.path.basename(shard) != "" for shard in shards):
        raise UserError(f"{index} is not a safetensors index; download it again")
    return dict(weight_map)


def read_header(file: Path) -> list[StoredTensor]:
    """The places of all tensors of a safetensors file. Raises UserError if it is missing, truncated, or in another format."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError("it ends within its header")
            document = json.loads(opened.read(length))
        document.pop("__metadata__", None)
        found = [_place(name, file, 8 + length, **entry) for name, entry in document.items()]
        if 8 + length + sum(place.num_bytes for place in found) != size:
            raise ValueError("its size is not that of its tensors")
        return found
    except FileNotFoundError:
        raise UserError(f"{file} is missing; download the checkpoint again") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, struct.error) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{file} is not a whole safetensors file ({reason}); download it again") from None


def _place(name: str, file: Path, begin: int, dtype: str, shape: list[int], data_offsets: list[int]) -> StoredTensor:
    first, last = data_offsets
    if first < 0 or (dtype in DTYPE_BITS and 8 * (last - first) != math.prod(shape) * DTYPE_BITS[dtype]):
        raise ValueError(f"{last - first} bytes for {dtype} {shape}")
    return StoredTensor(name, file, dtype, tuple(shape), begin + first, last - first)
