"""Digests of checkpoints: SHA-256 of every file, read in pieces, and kept in a cache as long as the file does not change."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from pipedec.gguf import is_gguf, located, model_files
from pipedec.model.bita import fingerprint

_CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)
_MAX_THREADS = 8
MAX_ENTRIES = 256  # of the cache


def config_digest(directory: Path) -> str:
    """Of what is not weights: sizes, end tokens, tokenizer, index. Files that do not exist do not count (64 hex digits)."""
    files = [model_files(directory) / name for name in _CONFIG_FILES]
    return _combined(path for path in files if path.is_file())


def quick_digest(directory: Path) -> str:
    """Of configuration and tokenizer, and of the first row of every tensor: most of what could differ, in no time."""
    return hashlib.sha256(f"{config_digest(directory)} {fingerprint(directory)}".encode()).hexdigest()


def weights_digest(directory: Path, cache: Path | None) -> str:
    """Of all ``*.safetensors`` files, or of a GGUF file, every byte (64 hex digits).

    Args:
        cache: a directory in which digests are kept while path, size, inode and both times of a file are the same; None reads all
            files.
    """
    return _combined(weight_files(directory), cache)


def weight_files(model: Path) -> list[Path]:
    """The files of a checkpoint that hold weights."""
    return [located(model)] if is_gguf(model) else sorted(model.glob("*.safetensors"))


def _combined(paths: Iterable[Path], cache: Path | None = None) -> str:
    """Of the names and contents of files."""
    files = list(paths)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        digests = threads.map(lambda path: _cached_digest(path, cache), files)
    lines = [f"{path.name} {digest}\n" for path, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _cached_digest(path: Path, cache: Path | None) -> str:
    if cache is None:
        return _digest(path)
    path = path.resolve()
    status = path.stat()
    identity = [str(path), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    entry = cache / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(entry.read_text())
        if known["file"] == identity:
            return str(known["sha256"])
    digest = _digest(path)
    _write(entry, {"file": identity, "sha256": digest})
    return digest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(entry: Path, content: dict[str, object]) -> None:
    """Another process may write the same entry at the same time. What cannot be kept is computed again."""
    partial = entry.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        entry.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # may be the state directory, which is private
        entry.parent.mkdir(mode=0o700, exist_ok=True)
        partial.write_text(json.dumps(content))
        partial.replace(entry)
        newest_first = sorted(entry.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in newest_first[MAX_ENTRIES:]:
            old.unlink(missing_ok=True)
