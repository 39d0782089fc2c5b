"""Digests of checkpoints: SHA-256 of every tensor that a host reads, kept in a cache as long as its file does not change.

Digests are computed of what is in the page cache afterwards, so that loading the same tensors does not read the disk again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from pipedec.checkpoints.tensors import StoredTensor, TensorFiles, read_header
from pipedec.config.environment import usable_cpus
from pipedec.core.errors import UserError
from pipedec.gguf import is_gguf, located, model_files

VOCABULARY_FILE = "draft_vocabulary.safetensors"  # beside the weights of a draft that does not know all tokens of its target
CONFIG_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "model.safetensors.index.json", VOCABULARY_FILE,
)  # fmt: skip
MAX_ENTRIES = 256  # files in the cache
COPY_AGAIN = "copy the same checkpoint to all hosts with `pipedec distribute`"  # what to do where digests differ
_MAX_THREADS = 8
_PIECE = 1 << 22  # bytes
_WHOLE = ""  # stands for the name of a tensor: the digest of a whole file
_UNUSED = ".rotary_emb.inv_freq"  # tensors of old checkpoints that are not used

Progress = Callable[[int, int], None]  # tensors digested, tensors in all; an exception that it raises ends the digest
Digests = Mapping[str, str]  # by name of the tensor, 64 hex digits each
TensorDigests = Mapping[str, Digests]  # by model


def config_digest(model: Path) -> str:
    """Digest everything but weights: sizes, end tokens, tokenizer, index (64 hex digits). Missing files do not count."""
    files = [model_files(model) / name for name in CONFIG_FILES]
    return combined({path.name: file_digest(path) for path in files if path.is_file()})


def weights_digest(model: Path, cache: Path | None) -> str:
    """Digest every byte of all tensors of a checkpoint (64 hex digits). Raises UserError if a file is missing or unreadable."""
    files = TensorFiles(model)
    files.check_here(files.file_of)
    return combined({tensor.name: digest for tensor, digest in tensor_digests(files.places.values(), cache).items()})


def combined(digests: Digests) -> str:
    """Combine named digests into one (64 hex digits). Unused tensors do not count."""
    lines = [f"{name} {digest}\n" for name, digest in sorted(digests.items()) if not name.endswith(_UNUSED)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tensor_digests(
    tensors: Iterable[StoredTensor], cache: Path | None, progress: Progress = lambda done, total: None
) -> dict[StoredTensor, str]:
    """Digest the type, shape and bytes of each tensor. Unused tensors are left out.

    Args:
        cache: a directory in which digests are kept while path, size, inode and both times of a file are the same; None reads all
            tensors.

    Raises UserError if a file cannot be read.
    """
    wanted = [tensor for tensor in tensors if not tensor.name.endswith(_UNUSED)]
    entries = {file: _Entry(file, cache) for file in {tensor.file for tensor in wanted}}
    found = {tensor: known for tensor in wanted if (known := entries[tensor.file].known.get(tensor.name))}
    if len(found) < len(wanted):
        progress(len(found), len(wanted))
    missing = sorted((tensor for tensor in wanted if tensor not in found), key=lambda one: (one.file, one.offset))
    with ThreadPoolExecutor(min(_MAX_THREADS, usable_cpus())) as threads:
        running = {threads.submit(_digest, tensor): tensor for tensor in missing}
        try:
            for future in as_completed(running):
                found[running[future]] = future.result()
                progress(len(found), len(wanted))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    for file, entry in entries.items():
        entry.keep({tensor.name: digest for tensor, digest in found.items() if tensor.file == file})
    return found


def content_digest(path: Path, cache: Path | None, name: str | None = None, digests: dict[str, str] | None = None) -> str:
    """Digest all bytes of a file; of a safetensors file, by way of the digests of its tensors (64 hex digits).

    ``cache`` is as in ``tensor_digests``, ``name`` the file's final name; ``digests`` receives what ``remember`` is to keep.
    Raises UserError if the file cannot be read.
    """
    found = {} if digests is None else digests
    if (name or path.name).endswith(".safetensors"):
        tensors = read_header(path)
        found |= {tensor.name: digest for tensor, digest in tensor_digests(tensors, cache).items()}
        with path.open("rb") as file:
            header = file.read(min((tensor.offset for tensor in tensors), default=0))
        return combined(found | {"": hashlib.sha256(header).hexdigest()})
    entry = _Entry(path, cache)
    found[_WHOLE] = entry.known.get(_WHOLE) or file_digest(path)
    entry.keep(found)
    return found[_WHOLE]


def remember(path: Path, digests: Digests, cache: Path) -> None:
    """Keep the known digests of a file that has just been written."""
    _Entry(path, cache).keep(digests)


def first_difference(mine: TensorDigests, theirs: TensorDigests) -> tuple[str, str] | None:
    """The model and the name of the first tensor that both have and that is not the same; None if there is none."""
    for model, tensors in mine.items():
        known = theirs.get(model, {})
        for name, digest in tensors.items():
            if known.get(name, digest) != digest:
                return model, name
    return None


def file_digest(path: Path) -> str:
    """SHA-256 of a whole file (64 hex digits)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(model: Path) -> str:
    """A quick digest of weights: SHA-256 over the name, shape and first row of every tensor (16 hex digits).

    Raises UserError if a file is missing.
    """
    files = TensorFiles(model)
    files.check_here(files.file_of)
    total = hashlib.sha256()
    for name, place in sorted(files.places.items()):
        total.update(f"{name} {list(place.shape)}".encode())
        if files.gguf is not None:
            total.update(files.gguf.read(name, 0, 1).tobytes())
            continue
        rows = place.shape[0] if len(place.shape) > 1 else 1  # all of a vector
        with place.file.open("rb", buffering=0) as file:
            total.update(os.pread(file.fileno(), place.num_bytes // max(rows, 1), place.offset))
    return total.hexdigest()[:16]


def weight_files(model: Path) -> list[Path]:
    """The files of a checkpoint that hold weights and are here."""
    return [located(model)] if is_gguf(model) else sorted([*model.glob("*.safetensors"), *model.glob("*.gguf")])


def _digest(tensor: StoredTensor) -> str:
    total = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    position, end = tensor.offset, tensor.offset + tensor.num_bytes
    try:
        with tensor.file.open("rb", buffering=0) as file:
            while position < end and (piece := os.pread(file.fileno(), min(_PIECE, end - position), position)):
                total.update(piece)
                position += len(piece)
    except OSError as error:
        raise UserError(f"{tensor.file} cannot be read: {error.strerror}") from None
    return total.hexdigest()


class _Entry:
    """The cached digests of a file in its present state: ``known``, by tensor."""

    def __init__(self, file: Path, cache: Path | None) -> None:
        self.known: dict[str, str] = {}
        self._path: Path | None = None
        if cache is None:
            return
        path = file.resolve()
        status = path.stat()
        self._file = [str(path), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        self._path = cache / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
        self.known = self._read()

    def keep(self, digests: Digests) -> None:
        """Add digests. Another process may write the same entry at the same time; what cannot be kept is computed again."""
        if self._path is None or digests.items() <= self.known.items():
            return
        entry, partial = self._path, self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            entry.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # may be the state directory, which is private
            entry.parent.mkdir(mode=0o700, exist_ok=True)
            partial.write_text(json.dumps({"file": self._file, "tensors": self._read() | dict(digests)}))
            partial.replace(entry)
            newest_first = sorted(entry.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
            for old in newest_first[MAX_ENTRIES:]:
                old.unlink(missing_ok=True)

    def _read(self) -> dict[str, str]:
        assert self._path is not None
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept = json.loads(self._path.read_text())
            if kept["file"] == self._file:
                return {str(name): str(digest) for name, digest in kept["tensors"].items()}
        return {}
