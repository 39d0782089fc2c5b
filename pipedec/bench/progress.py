"""How a benchmark of many rows reports its progress."""

from __future__ import annotations

from typing import Protocol


class SweepProgress(Protocol):
    """Receives the total number of rows, each row that is finished or known, and a text about the current work."""

    def start(self, total: int) -> None: ...

    def busy(self, text: str) -> None: ...

    def row(self) -> None: ...
