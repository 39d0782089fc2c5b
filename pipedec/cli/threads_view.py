"""The threads of an answer side by side, as they grow."""

from __future__ import annotations

from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

_LINES = 12  # of each thread, the latest
_BORDERS = {"running": "green", "waiting": "yellow", "ended": "dim"}


class ThreadsView:
    """On a terminal, one panel for each thread, redrawn in place; elsewhere, a line for each thread when it has ended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._threads: dict[tuple[int, ...], dict[str, Any]] = {}
        self._live = Live(console=console, refresh_per_second=10, transient=False) if console.is_terminal else None

    def __enter__(self) -> ThreadsView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, news: list[dict[str, Any]]) -> None:
        """Take in what threads have said."""
        for one in news:
            path = tuple(one["path"])
            known = self._threads.setdefault(path, {"text": "", "state": "running", "tokens": 0})
            has_ended = known["state"] == "ended"
            known |= {"text": known["text"] + one["text"], "state": one["state"], "tokens": one["tokens"]}
            if self._live is None and one["state"] == "ended" and not has_ended:
                self._console.print(f"{_name(path)}, {one['tokens']} tokens: {known['text'].strip()}", markup=False)
        if self._live is not None and news:
            self._live.update(self._panels())

    def _panels(self) -> Group:
        width = max(24, min(48, (self._console.width - 2) // max(1, min(len(self._threads), 4)) - 1))
        panels = [
            Panel(
                Text("\n".join(known["text"].strip().splitlines()[-_LINES:])),
                title=f"{_name(path)} · {known['tokens']}", width=width, border_style=_BORDERS[known["state"]],
            )
            for path, known in sorted(self._threads.items())
        ]  # fmt: skip
        return Group(Columns(panels))


def _name(path: tuple[int, ...]) -> str:
    return "main" if not path else "thread " + ".".join(str(ordinal + 1) for ordinal in path)
