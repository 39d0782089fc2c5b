"""Which family a checkpoint is of, by the ``model_type`` of its ``config.json``; well-known models by their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.families.base import DecoderConfig, ModelConfig, rope_sets, stretched_length
from pipedec.families.llama import LlamaConfig, MistralConfig
from pipedec.families.olmo2 import Olmo2Config
from pipedec.families.plan_shapes import GptOssShape, Qwen3MoeShape, Qwen35Shape
from pipedec.families.qwen import Qwen2Config, Qwen3Config
from pipedec.families.transformers import transformers_config
from pipedec.formats import Formats, indexed_formats, stated_formats, typical_formats
from pipedec.gguf import BLOCKS, TensorIndex, model_files
from pipedec.validation import read_text, validated

ModelImpl = Literal["auto", "pipedec", "transformers"]
FAMILIES: dict[str, type[DecoderConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "olmo2": Olmo2Config,
}

QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # of AutoGPTQ and AutoAWQ, with their methods


def _llama(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        model_type="llama", vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, **more,
    )  # fmt: skip


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> Qwen3Config:
    return Qwen3Config(
        model_type="qwen3", vocab_size=151936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, **more,
    )  # fmt: skip


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int) -> Qwen3MoeShape:
    return Qwen3MoeShape(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_experts=128, num_experts_per_tok=8,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> GptOssShape:
    """With its experts in MXFP4, as it was published."""
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return GptOssShape(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=layers,
        num_attention_heads=64, num_experts=experts, num_experts_per_tok=4,
        formats=stated_formats({"quant_method": "mxfp4", "modules_to_not_convert": plain}),
    )  # fmt: skip


# Models that can be planned without their checkpoints, as they are or in a format that follows a colon (``llama-3.1-70b:awq``).
KNOWN_MODELS: dict[str, ModelConfig] = {
    "llama-3.1-405b": _llama(16384, 53248, 126, 128),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "llama-3.3-70b": _llama(8192, 28672, 80, 64),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, tie_word_embeddings=True),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, tie_word_embeddings=True),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3.6-27b": Qwen35Shape(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
        num_attention_heads=24, linear_num_value_heads=48,
    ),
    "qwen3.6-35b-a3b": Qwen35Shape(
        model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=2048, intermediate_size=512, num_hidden_layers=40,
        num_attention_heads=16, num_key_value_heads=2, linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8,
        shared_expert_intermediate_size=512,
    ),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt-oss-20b": _gpt_oss(24, 32),
}  # fmt: skip


def model_config(model: str | Path, impl: ModelImpl = "auto") -> ModelConfig:
    """Read and check the ``config.json`` (and ``generation_config.json``) of a Hugging Face checkpoint, or of a GGUF file.

    Args:
        impl: what its layers are made of: ``pipedec``'s own parts, or ``transformers``' modules; ``auto`` for pipedec's if there
            is a family of them.

    Raises:
        UserError: there is none, a size is missing or impossible, the family or how its weights are stored is not supported.
    """
    directory = model_files(model)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: give the folder of a Hugging Face checkpoint")
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{path} is missing: give the folder of a Hugging Face checkpoint")
    document = json_object(path)
    formats = stored_formats(directory, document)
    family = FAMILIES.get(document.get("model_type", ""))
    if family is None and impl == "pipedec":
        supported, kind = ", ".join(FAMILIES), shortened(document.get("model_type"))
        raise UserError(f"{path}: model_type {kind!r} needs --model-impl transformers; pipedec itself has {supported}")
    if family is None or impl == "transformers":
        return replace(transformers_config(directory, _end_tokens(directory)), formats=formats)
    own = {item.name for item in fields(family)} - {"location", "formats"}
    known = {name: value for name, value in document.items() if name in own}
    known |= _end_tokens(directory) | {"location": str(directory)}
    return replace(validated(family, known, str(path)), formats=formats)


def stored_formats(directory: Path, document: Mapping[str, Any]) -> Formats:
    """The formats of a checkpoint's weights: by the index of its GGUF file, if it has one, by its ``config.json``, or, in old
    ones, by a file beside it. Raises UserError for what is not supported.
    """
    if (index := TensorIndex.found(directory)) is not None:
        return indexed_formats(index)
    path, stated = directory / "config.json", _with_text_config(document)
    quantization = stated.get("quantization_config") or stated.get("compression_config")
    older = {directory / name: method for name, method in QUANTIZATION_FILES.items() if (directory / name).is_file()}
    if not quantization and older:
        path, method = next(iter(older.items()))
        quantization = {"quant_method": method, **json_object(path)}
    try:
        return stated_formats(quantization)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def is_known(model: str | Path) -> bool:
    """Whether this names a shape for planning, perhaps with a format after it, and not a checkpoint."""
    return str(model).partition(":")[0] in KNOWN_MODELS


def model_by_name(name: str) -> ModelConfig:
    """A known model, or the checkpoint in directory ``name``. Raises UserError for neither, for an unknown format, or as
    ``model_config``.
    """
    if is_known(name):
        shape, colon, format = name.partition(":")
        known = KNOWN_MODELS[shape]
        if not colon:
            return known
        return replace(known, formats=typical_formats(format, known.num_hidden_layers, known.tie_word_embeddings))
    _check_known(name)
    return model_config(name)


def checkpoint_dtype(name: str | Path) -> str:
    """The dtype in which a model was published: the known ones in bfloat16, a checkpoint as its ``config.json`` has it.

    A file that names none counts as float32. A GGUF file has the 16 bits of its matrices, or bfloat16 if any are quantized.
    UserError if there is no such model.
    """
    if is_known(name):
        return "bfloat16"
    _check_known(name)
    directory = model_files(name)
    if (index := TensorIndex.found(directory)) is not None:
        types = {place.type for place in index.tensors.values() if len(place.shape) > 1}
        if "BF16" in types or not types.isdisjoint(BLOCKS):
            return "bfloat16"
        return "float16" if "F16" in types else "float32"
    document = _with_text_config(json_object(directory / "config.json"))
    return str(document.get("dtype") or document.get("torch_dtype") or "float32")


def context_length(directory: Path, max_model_len: int | None = None) -> int:
    """Tokens of a prompt and its answer together: the cluster's own limit, or what the ``config.json`` in ``directory`` has.

    Loads no torch. UserError if neither is known.
    """
    try:
        own = _stated_context(model_files(directory) / "config.json")
    except UserError:
        own = None
    known = [limit for limit in (max_model_len, own) if limit is not None]
    if not known:
        raise UserError(f"no config.json with max_position_embeddings in {directory}: start the cluster with --max-model-len")
    return min(known)


def _stated_context(path: Path) -> int | None:
    """``ModelConfig.context_length`` of a ``config.json``; None if it names none. Raises as ``model_config``."""
    document = _with_text_config(json_object(path))
    kind, trained = document.get("model_type", ""), document.get("max_position_embeddings")
    if kind in FAMILIES:
        return model_config(path.parent).context_length
    ropes = document.get("rope_scaling") or document.get("rope_parameters")
    known = rope_sets(ropes) if isinstance(ropes, dict) else ()
    return stretched_length(kind, trained, known) if isinstance(trained, int) else None


def _with_text_config(document: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json``, with what the config of the text model in a multimodal one states and the whole does not."""
    text = document.get("text_config")
    return {**text, **{key: value for key, value in document.items() if value}} if isinstance(text, dict) else dict(document)


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if it is missing or anything else."""
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON: download it again") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: not a JSON object: download it again")
    return document


def _end_tokens(directory: Path) -> dict[str, Any]:
    """``eos_token_id`` of generation_config.json, if it has any: an int or a list."""
    file = directory / "generation_config.json"
    ends = json_object(file).get("eos_token_id") if file.exists() else None
    return {} if ends is None else {"eos_token_id": ends}


def _check_known(name: str | Path) -> None:
    if not (model_files(name) / "config.json").is_file():
        known_models = ", ".join(KNOWN_MODELS)
        raise UserError(f"{shortened(name)!r} is neither a directory with a config.json nor a known model ({known_models})")
