"""Formats by the names of modules, as descriptions of quantized checkpoints give them; and how their values are checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.formats.base import PLAIN, Format, Formats

HEAD = "lm_head"
FULL_PRECISION = "Activations are kept in full precision, though the checkpoint was made for quantized ones."


@dataclass(frozen=True)
class ModuleFormats(Formats):
    """A rule for linear maps: those of layers, which have a number in their names, and the head.

    Attributes:
        rule: the format of the module with this name.
    """

    rule: Callable[[str], Format]
    title: str
    notes: tuple[str, ...] = ()

    def stated(self, name: str) -> Format:
        module = name.removesuffix(".weight")
        parts = module.split(".")
        return self.rule(module) if parts[-1] == HEAD or any(part.isdigit() for part in parts) else PLAIN


def all_but(skipped: Sequence[str], format: Format) -> Callable[[str], Format]:
    """The rule that gives all linear maps one format, apart from listed ones (see ``is_listed``)."""
    return lambda module: PLAIN if is_listed(module, skipped) else format


def is_listed(module: str, patterns: Sequence[str]) -> bool:
    """Whether a name or regular expression matches the beginning of a module's name, up to a dot, or is the end of it."""
    return any(module.endswith(one) or _begins(module, one) for one in patterns)


def is_named(module: str, names: Sequence[str]) -> bool:
    """Whether a module's name has one of these in it, up to dots: ``mlp.gate``, but not ``mlp.gate_proj``."""
    return any(f".{one.strip('.')}." in f".{module}." for one in names)


def _begins(module: str, text: str) -> bool:
    try:
        return re.match(rf"(?:{text})(?:(?<=\.)|(?=\.|$))", module) is not None
    except re.error:
        return module == text or module.startswith(f"{text}.")


def skipped_modules(quantization: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The modules that the first of these keys lists as plain; without a list, the head. Raises UserError for anything else."""
    return next((names(quantization, key) for key in keys if quantization.get(key) is not None), (HEAD,))


def choice(values: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """One of the values that are supported. Raises UserError, which names them, for others."""
    found = values.get(key, default)
    if found is None:
        found = default
    if not any(type(found) is type(one) and found == one for one in allowed):
        known = " or ".join(map(str, allowed))
        raise UserError(f"quantization_config: {key} {shortened(found)} is not supported, only {known}")
    return found


def group_size(values: Mapping[str, Any], key: str = "group_size", default: int = 128) -> int:
    """Inputs that share a scale; 0, for all, where the description has -1. Raises UserError for other numbers."""
    found = values.get(key, default)
    if type(found) is not int or found == 0 or found < -1:
        raise UserError(f"quantization_config: {key} must be -1 or a positive number, not {shortened(found)}")
    return max(found, 0)


def names(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The strings of a list, or of the lists in it; empty if there is none. Raises UserError for anything else."""
    found = values.get(key) or []
    flat = [one for part in found for one in (part if isinstance(part, list) else [part])] if isinstance(found, list) else []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in flat):
        raise UserError(f"quantization_config: {key} must be a list of strings")
    return tuple(map(str, flat))


def sections(values: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    """A mapping to mappings, empty if there is none. Raises UserError for anything else."""
    found = values.get(key) or {}
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise UserError(f"quantization_config: {key} must be a mapping of names to mappings")
    return found


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression. Raises UserError if it is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(f"quantization_config: {shortened(text)} is not a regular expression: {error}") from None
