"""Digests of checkpoints: SHA-256 over a sample of every tensor that a host reads, which takes seconds for any size.

Training changes tensors nearly everywhere, so a sample distinguishes checkpoints of the same shape. It does not find single bytes
that a disk or a copy has spoilt: for these, ``pipedec distribute --checksum`` compares whole files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipedec.core.errors import UserError
from pipedec.formats import StoredTensor, TensorFiles
from pipedec.gguf import is_gguf, located, model_files

VOCABULARY_FILE = "draft_vocabulary.safetensors"  # beside the weights of a draft that does not know all tokens of its target
CONFIG_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "model.safetensors.index.json", "quantize_config.json",
    "quant_config.json", VOCABULARY_FILE,
)  # fmt: skip
COPY_AGAIN = "copy the same checkpoint to all hosts with `pipedec distribute --checksum`"  # what to do where digests differ
BLOCKS = 8  # blocks that stand for a tensor, the first and the last one included
BLOCK_BYTES = 4096
_THREADS = 8  # as many reads at once, which a disk can order
_UNUSED = ".rotary_emb.inv_freq"  # tensors of old checkpoints that are not used

Digests = Mapping[str, str]  # 64 hex digits each by name of the tensor
TensorDigests = Mapping[str, Digests]  # by model


def config_digest(model: Path) -> str:
    """Digest everything but weights: sizes, end tokens, tokenizer, index (64 hex digits). Missing files do not count."""
    files = [model_files(model) / name for name in CONFIG_FILES]
    return combined({path.name: file_digest(path) for path in files if path.is_file()})


def weights_digest(model: Path) -> str:
    """Digest a sample of all tensors of a checkpoint (64 hex digits). Raises UserError if a file is missing or unreadable."""
    files = TensorFiles(model)
    files.check_here(files.file_of)
    return combined({tensor.name: digest for tensor, digest in tensor_digests(files.places.values()).items()})


def combined(digests: Digests) -> str:
    """Combine named digests into one (64 hex digits). Unused tensors do not count."""
    lines = [f"{name} {digest}\n" for name, digest in sorted(digests.items()) if not name.endswith(_UNUSED)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tensor_digests(tensors: Iterable[StoredTensor]) -> dict[StoredTensor, str]:
    """Digest a sample of each tensor (see ``sample_digest``). Unused tensors are left out. Raises UserError if a file cannot be
    read.
    """
    wanted = [tensor for tensor in tensors if not tensor.name.endswith(_UNUSED)]
    wanted.sort(key=lambda one: (one.file, one.offset))
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(wanted, threads.map(sample_digest, wanted), strict=True))


def sample_digest(tensor: StoredTensor) -> str:
    """SHA-256 of a tensor's type and shape and of ``BLOCKS`` evenly spaced blocks of its bytes, or of all of them if they are no
    more than that (64 hex digits). Raises UserError if the file cannot be read.
    """
    total = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    last = max(0, tensor.num_bytes - BLOCK_BYTES)
    places = list(range(0, tensor.num_bytes, BLOCK_BYTES))
    if len(places) > BLOCKS:
        places = [last * block // (BLOCKS - 1) for block in range(BLOCKS)]
    try:
        with tensor.file.open("rb", buffering=0) as file:
            for place in places:
                length = min(BLOCK_BYTES, tensor.num_bytes - place)
                total.update(os.pread(file.fileno(), length, tensor.offset + place))
    except OSError as error:
        raise UserError(f"{tensor.file} cannot be read: {error.strerror}") from None
    if tensor.rest is not None:
        total.update(sample_digest(tensor.rest).encode())
    return total.hexdigest()


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
    path = located(model)
    return [path] if is_gguf(path) else sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
