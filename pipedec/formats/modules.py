"""Which matrices of a checkpoint are quantized, where its description names those that are not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.formats.base import PLAIN, Format, Formats

_EMBEDDINGS = ("embed_tokens", "embed_in", "word_embeddings", "tok_embeddings", "wte", "wpe", "embed_positions")
_HEADS = ("lm_head", "embed_out")  # plain unless a checkpoint lists what is


@dataclass(frozen=True)
class LinearFormats(Formats):
    """The matrices of all linear maps in one format, apart from those that are listed as plain.

    Attributes:
        format: of the matrices.
        title: as users know it.
        skipped: names or regular expressions of modules that are plain.
        remarks: see ``notes``.
    """

    format: Format
    title: str
    skipped: Sequence[str] = _HEADS
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        return self.remarks

    def stated(self, name: str) -> Format:
        module = name.removesuffix(".weight")
        return PLAIN if module.split(".")[-1] in _EMBEDDINGS or is_listed(module, self.skipped) else self.format


def is_listed(module: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the beginning of a module's name, up to a dot, or is the end of it."""
    return any(module.endswith(one) or _begins(module, one) for one in patterns)


def _begins(module: str, pattern: str) -> bool:
    try:
        return re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) is not None
    except re.error:
        return module == pattern or module.startswith(f"{pattern}.")


def skipped_modules(quantization: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The modules that the first of these keys lists as plain; without a list, the head. Raises UserError for anything else."""
    for key in keys:
        if (found := quantization.get(key)) is not None:
            if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
                raise UserError(f"quantization_config: {key} must be a list of names of modules, not {shortened(found)}")
            return tuple(found)
    return _HEADS
