"""Tiny GGUF files: checkpoints of random weights written as llama.cpp's converter writes them, for every test that needs one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from architectures.zoo import save_model
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from pipedec.core.errors import UserError
from pipedec.engine.build import checked
from pipedec.families.skeleton import stated_config
from pipedec.gguf import BLOCKS, TensorIndex, model_files
from pipedec.model import Checkpoint
from support.gguf_architectures import NAMES, factors, fields_of, file_tensors, layer_values

Floats = npt.NDArray[np.float32]
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")  # the gguf library reads them, but does not write them
_NOT_IN_METADATA = {"dtype", "transformers_version", "architectures", "_name_or_path", "initializer_range", "max_window_layers"}
_NOT_IN_METADATA |= {"bos_token_id", "pad_token_id", "eos_token_id", "num_nextn_predict_layers"}
_RANDOM_SCALES = {"Q4_K": {0: 5e-4, 2: 4e-3}, "Q5_K": {0: 3e-4, 2: 5e-3}, "Q6_K": {208: 8e-5}}  # by place in a block


def save_gguf(
    path: Path,
    checkpoint: Path,
    kind: str = "F32",
    tokenizer: Mapping[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    extra_tensors: Mapping[str, Floats] | None = None,
    architecture: str | None = None,
    kinds: Mapping[str, str] | None = None,
    is_new: bool = True,
    **fields: Any,
) -> Path:
    """Write a checkpoint of one safetensors file as GGUF; return ``path``.

    Args:
        kind: type of the matrices; for one of K_TYPES they are random, whatever the checkpoint says. Vectors stay F32, and so do
            matrices whose rows are no whole blocks.
        kinds: other types of matrices, by a part of their names in the file.
        tokenizer: the fields below ``tokenizer.ggml``, and ``chat_template``; those of the checkpoint's byte-level BPE if None.
            Without one a tokenizer that knows no text.
        architecture: in GGUF, if not the usual one of the checkpoint's model_type.
        is_new: whether by a converter of today; the older one of Qwen3-Next writes a matrix that is two now.
        leave_out: tensors, by their names in the file, that are not written.
        fields: of metadata, with ``__`` for a dot, added to the usual ones or put in their place; None leaves one out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = architecture or NAMES.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, fields.pop("general__architecture", architecture))
    named = {name.replace("__", "."): value for name, value in fields.items()}
    if tokenizer is None:
        has_one = (checkpoint / "tokenizer.json").exists()
        tokenizer = byte_level_tokenizer(checkpoint) if has_one else _silent_tokenizer(config["vocab_size"])
    tokens = {f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}": value for name, value in tokenizer.items()}
    values_of_layers = layer_values(config, checkpoint)
    for name, value in {**sizes(config, architecture), **values_of_layers, **tokens, **named}.items():
        if value is not None:
            _add(writer, name, value)
    tensors = tensors_of(checkpoint, config, architecture, is_new)
    for name, values in {**tensors, **factors(config), **(extra_tensors or {})}.items():
        if name not in leave_out:
            _write_tensor(writer, name, values, next((own for part, own in (kinds or {}).items() if part in name), kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_model_and_gguf(folder: Path, model_type: str, config: Mapping[str, Any], **options: Any) -> tuple[Path, Path]:
    """A checkpoint, and the GGUF file of it. Values of norms have few digits, so that adding to them loses none."""
    source = folder / "source"
    save_model(model_type, source, **config)
    tensors = load_file(source / "model.safetensors")
    save_file({key: np.round(values * 256) / 256 if "norm" in key else values for key, values in tensors.items()},
              source / "model.safetensors", {"format": "pt"})  # fmt: skip
    return source, save_gguf(folder / "model.gguf", source, **options)


def gguf_refusal(file: Path) -> str:
    """Why a file is not used: one line that names it."""
    with pytest.raises(UserError) as caught:
        checked(file)
    message = str(caught.value)
    assert str(file) in message and "\n" not in message
    return message


def sizes(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Metadata of a model, by the values in its ``config.json``."""
    return {f"{architecture}.{name}": value for name, value in fields_of(config).items()}


def tensors_of(checkpoint: Path, config: Mapping[str, Any], architecture: str, is_new: bool = True) -> dict[str, Floats]:
    """The tensors by their names in a GGUF file, with their values and rows as llama.cpp has them."""
    known = get_tensor_name_map(
        next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture), config["num_hidden_layers"]
    )
    stored = file_tensors(config, load_file(checkpoint / "model.safetensors"), is_new)
    return {
        str(known.get_name(name, (".weight", ".bias"))): np.ascontiguousarray(values, dtype=np.float32)
        for name, values in stored.items()
    }


def values_in(file: Path, source: Path, folder: Path, is_new: bool = True) -> dict[str, Floats]:
    """The values of a checkpoint as the file has them, with the library's widening.

    Where each is in the file is found by converting a checkpoint whose matrices hold the numbers of their places.
    """
    original = load_file(source / "model.safetensors")
    starts = dict(zip(original, accumulate((values.size for values in original.values()), initial=0), strict=False))
    numbered = {key: np.arange(values.size).reshape(values.shape) + starts[key] for key, values in original.items()}
    matrices = {key: values.astype(np.float32) for key, values in numbered.items() if values.ndim > 1}
    save_file(matrices, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    reader = GGUFReader(file)
    places = tensors_of(folder, config, str(reader.fields["general.architecture"].contents()), is_new)
    found = np.empty(sum(values.size for values in original.values()), np.float32)
    for tensor in reader.tensors:
        if tensor.name in places:
            found[places[tensor.name].astype(np.int64).reshape(-1)] = dequantize(tensor.data, tensor.tensor_type).reshape(-1)
    return original | {key: found[numbered[key]] for key in matrices}


def assert_states_config(file: Path, source: Path) -> None:
    """That the config of the file is that of the checkpoint."""
    stated, written = (stated_config(folder).to_dict() for folder in (model_files(file), source))
    for key in written.keys() - _NOT_IN_METADATA:
        assert stated[key] == written[key], key


def assert_reads(file: Path, expected: dict[str, Floats]) -> None:
    """That the checkpoint has these tensors and no others, also row by row and in blocks."""
    checkpoint, index = Checkpoint(file), TensorIndex.load(model_files(file))
    assert set(checkpoint.names) == expected.keys()
    for key, values in expected.items():
        read = torch.empty(values.shape)
        checkpoint.read_into({key: read})
        if key.endswith("A_log"):  # the logarithm of an exponential function, both rounded
            torch.testing.assert_close(read, torch.from_numpy(values), atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(read, torch.from_numpy(values)), key
        if values.ndim > 1:
            half = len(values) // 2
            assert np.array_equal(index.read(key, half), values[half:]), key
            if (kind := index.tensors[key].read_type) in BLOCKS:
                assert np.array_equal(dequantize(index.raw(key, half), GGMLQuantizationType[kind]), values[half:]), key


def byte_level_tokenizer(directory: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """The fields of a byte-level BPE tokenizer, from ``tokenizer.json`` and ``tokenizer_config.json``."""
    state = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    template = directory / "chat_template.jinja"
    vocabulary = state["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [int(TokenType.CONTROL if token in special else TokenType.NORMAL) for token in tokens],
        "merges": merges,
        "bos_token_id": vocabulary[config["bos_token"]],
        "eos_token_id": vocabulary[config["eos_token"]],
        "padding_token_id": vocabulary.get(config.get("pad_token")),
        "chat_template": template.read_text() if template.exists() else None,
    }


def _silent_tokenizer(vocab_size: int) -> dict[str, Any]:
    tokens = [f"<{number}>" for number in range(vocab_size)]
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [int(TokenType.UNUSED)] * vocab_size}


def quantized(values: Floats, kind: str) -> npt.NDArray[Any]:
    """Values in the bytes of a type, uint8 [..., bytes of a row]. For one of K_TYPES: random blocks."""
    number = GGMLQuantizationType[kind]
    if kind not in K_TYPES:
        return quantize(values, number)
    values_per_block, bytes_per_block = GGML_QUANT_SIZES[number]
    rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
    generator = np.random.default_rng(rows + columns)
    blocks = generator.integers(0, 256, (rows * columns // values_per_block, bytes_per_block), np.uint8)
    for place, scale in _RANDOM_SCALES[kind].items():
        scales = generator.uniform(0.5, 1.5, (len(blocks), 1)) * scale
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def _write_tensor(writer: GGUFWriter, name: str, values: Floats, kind: str) -> None:
    if values.ndim == 1 or values.shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, quantized(values, kind), raw_dtype=GGMLQuantizationType[kind])


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
