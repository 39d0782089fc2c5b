"""The sizes of a model: of a known one by its name, of a checkpoint from its ``config.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pipedec.config.files import read_text
from pipedec.core import UserError
from pipedec.gguf import model_files
from pipedec.hardware import MODEL_SHAPES, SUPPORTED_MODEL_TYPES, ModelShape, optional_weights
from pipedec.validation import shortened, validated

_QWEN3_HEAD_DIM = 128  # where config.json gives none; of the other types it then follows from the hidden size


def model_shape(name: str) -> ModelShape:
    """The sizes of a known model, or of the checkpoint in directory ``name``.

    Raises:
        UserError: neither, or a model type that is not supported.
    """
    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    path, document = _config_json(name)
    model_type = document.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise UserError(f"{path}: model_type {shortened(model_type)!r} is not supported: it must be one of {supported}")
    sizes = {item.name: document[item.name] for item in fields(ModelShape) if document.get(item.name) is not None}
    sizes.setdefault("num_key_value_heads", sizes.get("num_attention_heads"))
    if model_type == "qwen3":
        sizes.setdefault("head_dim", _QWEN3_HEAD_DIM)
    optional = optional_weights(model_type, bool(document.get("attention_bias")), bool(document.get("mlp_bias")))
    return validated(ModelShape, sizes | asdict(optional), str(path))


def checkpoint_dtype(name: str | Path) -> str:
    """The dtype in which a model was published: the known ones in bfloat16, a checkpoint as its ``config.json`` has it.

    A file that names none counts as float32. So does a GGUF file, whose weights are de-quantised in float32.

    Raises:
        UserError: there is no such model.
    """
    if name in MODEL_SHAPES:
        return "bfloat16"
    _, document = _config_json(name)
    return str(document.get("dtype") or document.get("torch_dtype") or "float32")


def _config_json(name: str | Path) -> tuple[Path, dict[str, Any]]:
    """The ``config.json`` of a checkpoint, and what it holds. UserError if there is none."""
    path = model_files(name) / "config.json"
    if not path.is_file():
        known_models = ", ".join(MODEL_SHAPES)
        raise UserError(f"{shortened(name)!r} is neither a directory with a config.json nor a known model ({known_models})")
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON") from None
    return path, document if isinstance(document, dict) else {}


def context_length(directory: Path, max_model_len: int | None = None) -> int:
    """Tokens of a prompt and its answer together.

    Args:
        directory: of the checkpoint, or of its tokenizer if its ``config.json`` is there, too.
        max_model_len: the cluster's own limit; None for none.

    Raises:
        UserError: neither is known.
    """
    try:
        positions = json.loads(read_text(model_files(directory) / "config.json"))["max_position_embeddings"]
    except (UserError, ValueError, KeyError, TypeError, RecursionError):
        positions = None
    known = [limit for limit in (max_model_len, positions) if isinstance(limit, int)]
    if not known:
        raise UserError(f"no config.json with max_position_embeddings in {directory}: start the cluster with --max-model-len")
    return min(known)
