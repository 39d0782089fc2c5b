"""The picture of runs on a terminal, drawn anew while there is news, and the keys that steer it.

Knows sources of frames, not where these come from.
"""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pipedec.live.panels import LEGEND, screen
from pipedec.live.view import Frame, ShownRun

REDRAW_SECONDS = 0.1
_LOOK_SECONDS = 0.5  # between two pictures without news: states change, and the size of the terminal
_KEYS = "q leaves  space stops the picture  ↑ ↓ request  ← → run"
_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}  # by the last letter of what a terminal sends


class Source(Protocol):
    """Where frames come from; ``runs`` is what there is to draw of them."""

    runs: list[ShownRun]

    def take(self) -> list[Frame]:
        """Add the frames that have come since the last call to ``runs``, and return them."""

    def is_complete(self) -> bool:
        """Return True if everything that can be drawn now is there."""

    def has_ended(self) -> bool:
        """Return True if no more frames come."""

    def close(self) -> None:
        """Release connections and files."""


class Screen:
    """The picture, drawn again while there is news, and the keys."""

    def __init__(self, sources: Sequence[Source], console: Console) -> None:
        self._sources = sources
        self._console = console
        self._chosen = 0  # run
        self._stopped: list[ShownRun] | None = None  # the runs as they were then
        self._drawn = 0.0

    def run(self, raise_missed: Callable[[], None]) -> None:
        """Until q is pressed, or ``raise_missed`` raises."""
        with _keys() as pressed, Live(console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                raise_missed()
                has_news = any([source.take() for source in self._sources]) and self._stopped is None
                if has_news or time.monotonic() >= self._drawn + _LOOK_SECONDS:
                    self._drawn = time.monotonic()
                    live.update(self._picture(), refresh=True)
                for key in pressed(REDRAW_SECONDS):
                    if key == "q":
                        return
                    self._press(key)

    def _picture(self) -> Group:
        width, height = self._console.size
        foot = Text(f"{'' if self._stopped is None else 'STOPPED  '}{_KEYS}   {LEGEND}", "dim", no_wrap=True)
        foot.truncate(width, overflow="ellipsis")
        return Group(screen(self._shown(), self._chosen, width, height - 1, shows_colour(self._console)), foot)

    def _shown(self) -> list[ShownRun]:
        if self._stopped is not None:
            return self._stopped
        return [shown for source in self._sources for shown in source.runs]

    def _press(self, key: str) -> None:
        self._drawn = 0.0
        if key == " ":
            self._stopped = deepcopy(self._shown()) if self._stopped is None else None
        elif key in ("left", "right"):
            self._chosen = (self._chosen + (1 if key == "right" else -1)) % len(self._shown())
        elif key in ("up", "down"):
            shown = self._shown()[self._chosen]
            if (present := shown.request()) is not None:
                numbers = list(shown.run.requests)[:: -1 if key == "up" else 1]
                shown.chosen = numbers[(numbers.index(present.number) + 1) % len(numbers)]


def shows_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


@contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """Yields a function that waits for keys, for so many seconds at most. The terminal is as it was afterwards."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> list[str]:
            time.sleep(seconds)
            return []

        yield wait
        return
    descriptor = sys.stdin.fileno()
    usual = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: _pressed(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, usual)


def _pressed(descriptor: int, seconds: float) -> list[str]:
    if not select.select([descriptor], [], [], seconds)[0]:
        return []
    typed = os.read(descriptor, 64).decode(errors="ignore")
    if not typed:
        time.sleep(seconds)  # the terminal is gone
    pressed = re.findall(r"\x1b[\[O][A-D]|.", typed, re.DOTALL)
    return [_ARROWS[key[-1]] if len(key) > 1 else key for key in pressed]
