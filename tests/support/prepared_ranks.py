"""Ranks in which a test runs code of its own, for instance to count messages or to react to signals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class PreparedRanks(str):
    """The name of a transport. When it arrives in a rank's process, ``prepare(folder)`` runs there.

    ``prepare`` is a function of a module, which every rank imports: keep its imports few.
    """

    prepare: Callable[[Path], None]
    folder: Path

    def __new__(cls, transport: str, prepare: Callable[[Path], None], folder: Path) -> PreparedRanks:
        ranks = super().__new__(cls, transport)
        ranks.prepare, ranks.folder = prepare, folder
        return ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return _prepared, (str(self), self.prepare, self.folder)


def _prepared(transport: str, prepare: Callable[[Path], None], folder: Path) -> str:
    prepare(folder)
    return transport
