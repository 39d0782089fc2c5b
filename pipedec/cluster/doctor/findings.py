"""A finding of the doctor: the state of one thing, and how to mend it. Does not know how anything is examined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table."""

    name: str  # what was examined
    level: Level  # ``problem`` if a run will fail, ``note`` if it may suffer
    value: str  # what was found, in a few words
    mend: str | None = None  # what to do, in one line; every problem has one


def ok(name: str, value: str) -> Finding:
    return Finding(name, "ok", value)


def note(name: str, value: str, mend: str | None = None) -> Finding:
    return Finding(name, "note", value, mend)


def problem(name: str, value: str, mend: str) -> Finding:
    return Finding(name, "problem", value, mend)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def gb(num_bytes: int) -> str:
    """A number of bytes in the unit used for files and checkpoints."""
    return f"{num_bytes / 1e9:.3g} GB"


def first_line(error: Exception) -> str:
    """An error's message, in one line of 200 characters."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
