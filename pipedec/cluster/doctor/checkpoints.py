"""A checkpoint on this host: which of its files are here, which are missing for this host's ranks, and a fingerprint to compare.
Reads a small part of the weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipedec.checkpoints import INDEX_FILE, CheckpointPart, TensorFiles, config_digest, has_weights, weight_files
from pipedec.cluster.doctor.gpus import first_line
from pipedec.gguf import model_files

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
        free_bytes: of the disk; None if unknown.
    """

    error: str | None
    config_digest: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    weight_bytes: int = 0
    missing: tuple[MissingFile, ...] = ()
    free_bytes: int | None = None


def checkpoint_facts(part: CheckpointPart, spare: CheckpointPart | None = None) -> CheckpointFacts:
    """Whether a checkpoint, or the prompt of a BiTA, is there.

    Args:
        part: what the ranks of this host read of it.
        spare: what they may have to read when they take over others.
    """
    free = _free_bytes(Path(part.model))
    try:
        if not (directory := model_files(part.model)).is_dir():
            return CheckpointFacts("no such directory", free_bytes=free)
        if not has_weights(directory) and part.is_read:
            TensorFiles(part.model)  # says what it lacks
        present, lacking = weight_files(Path(part.model)), part.missing()
        later = [file for file in (spare or part).missing() if file not in lacking]
        typical = _typical_bytes(directory)
        return CheckpointFacts(
            None, config_digest(Path(part.model)), {file.name: _sampled(file) for file in present},
            sum(file.stat().st_size for file in present),
            tuple(MissingFile(file.name, typical, file in later) for file in (*lacking, *later)), free,
        )  # fmt: skip
    except Exception as error:  # a damaged file, a disk that fails
        return CheckpointFacts(first_line(error), free_bytes=free)


def _typical_bytes(directory: Path) -> int:
    """The size of a file with weights, by the index; 0 without one."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        index = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))
        return int(index["metadata"]["total_size"]) // len(set(index["weight_map"].values()))
    return 0


def _sampled(file: Path) -> str:
    """The size of a file and a digest of pieces of it: most of what could differ, in no time."""
    size, total = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for index in range(SAMPLES):
            opened.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            total.update(opened.read(SAMPLE_BYTES))
    return f"{size} {total.hexdigest()[:16]}"


def _free_bytes(path: Path) -> int | None:
    """Free bytes on the disk on which ``path`` is, or would be."""
    with suppress(OSError):
        return shutil.disk_usage(next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())).free
    return None
