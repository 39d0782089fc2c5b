"""Progress of a sweep or a study of policies, for tests that watch it."""

from __future__ import annotations


class Silent:
    """A progress bar that counts."""

    def __init__(self) -> None:
        self.total = self.rows = 0

    def start(self, total: int) -> None:
        self.total = total

    def busy(self, text: str) -> None:
        assert text

    def row(self) -> None:
        self.rows += 1
