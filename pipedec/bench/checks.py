"""A check that the configurations of several benchmarks share."""

from __future__ import annotations

from collections.abc import Iterable

from pipedec.core import UserError


def check_known(kind: str, name: str, choices: Iterable[str]) -> None:
    """Raise UserError unless ``name`` is one of ``choices``."""
    if name not in choices:
        raise UserError(f"unknown {kind} {name!r}: choose one of {', '.join(choices)}")
