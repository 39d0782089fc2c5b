"""Checks of recipes: each raises a UserError that names the flag and the allowed values."""

from __future__ import annotations

import math
from typing import Any

from pipedec.core import UserError


def at_least_one(recipe: Any, *names: str) -> None:
    """Fields that are counts; None passes."""
    for name in names:
        value = getattr(recipe, name)
        if value is not None and value < 1:
            raise UserError(f"{_flag(name)} must be at least 1")


def above_zero(recipe: Any, *names: str) -> None:
    """Fields that are finite positive numbers; None passes."""
    for name in names:
        value = getattr(recipe, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{_flag(name)} must be above 0")


def shares(recipe: Any, *names: str) -> None:
    """Fields between 0 and 1."""
    for name in names:
        if not 0 <= getattr(recipe, name) <= 1:
            raise UserError(f"{_flag(name)} must be between 0 and 1")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
