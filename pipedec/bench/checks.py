"""Checks that the configurations of several benchmarks share. Each raises a UserError that names the flag or the value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipedec.core import UserError


def check_positive(numbers: Mapping[str, Iterable[int]]) -> None:
    """Raise UserError for the first flag without numbers, or with one below 1."""
    for flag, values in numbers.items():
        if min(values, default=0) < 1:
            raise UserError(f"{flag} must be at least 1")


def check_known(kind: str, name: str, choices: Iterable[str]) -> None:
    """Raise UserError unless ``name`` is one of ``choices``."""
    if name not in choices:
        raise UserError(f"unknown {kind} {name!r}: choose one of {', '.join(choices)}")
