"""The model of a run, for lists of models: its family, how it is stored, what it can do. Knows no API."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipedec.checkpoints import weight_files
from pipedec.core.errors import UserError
from pipedec.families import json_object
from pipedec.gguf import located, model_files
from pipedec.server.front import Front
from pipedec.text.parsers import knows_tools


@dataclass(frozen=True)
class ServedModel:
    """Empty texts, and zeros, for what is not known here: the checkpoint may be on other machines, or the model be loading."""

    family: str = ""  # ``model_type`` of config.json
    format: str = ""  # of the checkpoint's files: ``gguf`` or ``safetensors``
    quantization: str = ""  # and dtype, as rank 0 computes
    size: int = 0  # bytes
    digest: str = ""  # 64 hex digits
    context: int | None = None  # tokens
    template: str = ""  # of chats
    calls_tools: bool = False
    thinks: bool = False


def served_model(front: Front) -> ServedModel:
    """Looks at files: call it seldom."""
    if (served := front.served) is None:
        return ServedModel()
    description, template = served.description, served.tokenizer.tool_template
    target, family, size = Path(description.target), "", 0
    with suppress(UserError):
        family = str(json_object(model_files(served.tokenizer.directory) / "config.json").get("model_type", ""))
    with suppress(UserError, OSError):
        size, target = sum(file.stat().st_size for file in weight_files(target)), located(target)
    weights = "gguf" if target.suffix.lower() == ".gguf" else "safetensors"
    digest = description.digests.get("target") or hashlib.sha256(description.target.encode()).hexdigest()
    return ServedModel(
        family, weights, description.ranks[0].dtype.name if description.ranks else "",
        size, digest, served.max_model_len, template, knows_tools(template) and front.tool_parser is not None,
        front.reasoning is not None,
    )  # fmt: skip
