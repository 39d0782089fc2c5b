"""A checkpoint on this host: which of its files are here, which are missing for this host's ranks, and what tells two of them
apart. Reads a small part of the weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipedec.cluster.doctor.gpus import first_line
from pipedec.cluster.doctor.needs import Part
from pipedec.core import UserError
from pipedec.gguf import is_gguf, model_files

SAMPLES = 16  # pieces of a file that stand for all of it
SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class MissingFile:
    """A file with weights that is not here; ``num_bytes`` is an estimate."""

    name: str
    num_bytes: int
    only_for_spares: bool


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint directory.

    Attributes:
        error: what is wrong with it; None if nothing is but ``missing``.
        config_digest: of configuration, tokenizer and index.
        files: by the name of each file with weights that is here, its size and a digest of samples of it.
        weight_bytes: of these files.
        missing: files that the ranks of this host would read.
        free_bytes: of the disk; None if it cannot be said.
    """

    error: str | None
    config_digest: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    weight_bytes: int = 0
    missing: tuple[MissingFile, ...] = ()
    free_bytes: int | None = None


def checkpoint_facts(model: str, parts: Sequence[Part] | None = None) -> CheckpointFacts:
    """Whether a checkpoint, or the prompt of a BiTA, is there.

    Args:
        model: a directory, a GGUF file or the name of a model that is installed.
        parts: what the ranks of this host read of it; None for all of it.
    """
    free = _free_bytes(Path(model))
    try:
        if not (directory := model_files(model)).is_dir():
            return CheckpointFacts("no such directory", free_bytes=free)
        from pipedec.checkpoints import weight_files
        from pipedec.checkpoints import config_digest

        present = weight_files(Path(model))
        needed = None if is_gguf(model) else _needed(directory, parts)
        if not present and needed is None and parts != ():
            Checkpoint(model)  # says what it lacks
        for file in present:
            _check_whole(file)
        missing = [file for file in needed or () if not (directory / file.name).is_file()]
        return CheckpointFacts(
            None, config_digest(Path(model)), {file.name: _sampled(file) for file in present},
            sum(file.stat().st_size for file in present), tuple(missing), free,
        )  # fmt: skip
    except Exception as error:  # a damaged file, a torch that cannot be imported
        return CheckpointFacts(first_line(error), free_bytes=free)


def _needed(directory: Path, parts: Sequence[Part] | None) -> list[MissingFile] | None:
    """The files that the parts are in, as the index has it; None without an index."""
    from pipedec.model.checkpoint import EMBEDDING, FINAL_NORM, HEAD, INDEX_FILE

    if not (directory / INDEX_FILE).exists():
        return None
    index = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))
    shard_of: dict[str, str] = index["weight_map"]
    typical = int(index.get("metadata", {}).get("total_size", 0)) // len(set(shard_of.values()))

    def holds(part: Part, tensor: str) -> bool:
        if tensor in (EMBEDDING, FINAL_NORM, HEAD):
            return (part.first and tensor == EMBEDDING) or (part.last and (tensor != EMBEDDING or HEAD not in shard_of))
        number = tensor.removeprefix("model.layers.").partition(".")[0]
        return number.isdecimal() and part.start <= int(number) < part.stop

    every = parts if parts is not None else [Part(0, 1 << 30, True, True)]
    at_once = {shard for name, shard in shard_of.items() if any(holds(part, name) for part in every if not part.is_spare)}
    later = {shard for name, shard in shard_of.items() if any(holds(part, name) for part in every if part.is_spare)}
    return [MissingFile(shard, typical, shard not in at_once) for shard in sorted(at_once | later)]


def _check_whole(file: Path) -> None:
    """Raises UserError if a file is no safetensors file, or is cut off."""
    from safetensors import SafetensorError, safe_open

    if file.suffix != ".safetensors":
        return
    try:
        with safe_open(str(file), framework="pt"):
            return
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file.name}: {first_line(error)}") from None


def _sampled(file: Path) -> str:
    """The size of a file and a digest of pieces of it: most of what could differ, in no time."""
    size, total = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for index in range(SAMPLES):
            opened.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            total.update(opened.read(SAMPLE_BYTES))
    return f"{size} {total.hexdigest()[:16]}"


def _free_bytes(path: Path) -> int | None:
    """Of the disk on which ``path`` is, or would be."""
    with suppress(OSError):
        return shutil.disk_usage(next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())).free
    return None
