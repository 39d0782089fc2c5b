"""The decode threads of an answer side by side, while they are generated (``--show-threads``)."""

from __future__ import annotations

from msgspec.structs import replace
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from pipedec.messages import ThreadNews

_LINES = 12  # the latest lines of each thread that a panel shows
_BORDERS = {"running": "green", "waiting": "yellow", "ended": "dim"}


class ThreadsView:
    """On a terminal, one panel per thread, redrawn in place. Otherwise one line per thread, printed when the thread ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._threads: dict[tuple[int, ...], ThreadNews] = {}  # with the whole text of each
        self._live = Live(console=console, refresh_per_second=10, transient=False) if console.is_terminal else None

    def __enter__(self) -> ThreadsView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, changes: list[ThreadNews]) -> None:
        """Show new text and states of threads."""
        for change in changes:
            before = self._threads.get(change.path, ThreadNews(change.path, "", "running", 0))
            known = self._threads[change.path] = replace(change, text=before.text + change.text)
            if self._live is None and known.state == "ended" != before.state:
                self._console.print(f"{_name(known.path)}, {known.tokens} tokens: {known.text.strip()}", markup=False)
        if self._live is not None and changes:
            self._live.update(self._panels())

    def _panels(self) -> Group:
        width = max(24, min(48, (self._console.width - 2) // max(1, min(len(self._threads), 4)) - 1))
        panels = [
            Panel(
                Text("\n".join(known.text.strip().splitlines()[-_LINES:])),
                title=f"{_name(path)} · {known.tokens}", width=width, border_style=_BORDERS[known.state],
            )
            for path, known in sorted(self._threads.items())
        ]  # fmt: skip
        return Group(Columns(panels))


def _name(path: tuple[int, ...]) -> str:
    return "main" if not path else "thread " + ".".join(str(ordinal + 1) for ordinal in path)
