"""``pipedec top``: what runs do, drawn on a terminal while they do it, from their live feeds; or from a recording of these."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pipedec.cli.interrupts import Interrupts
from pipedec.cli.live_panels import LEGEND, Shown, panel, screen
from pipedec.cli.live_sources import Recording, RunSource, Source
from pipedec.cli.options import Redis
from pipedec.cluster.state import find_run
from pipedec.core import UserError
from pipedec.flags import Help, options_of

_REDRAW_SECONDS = 0.1
_LOOK_SECONDS = 0.5  # between two pictures without news: states change, and the size of the terminal
_FIRST_SECONDS = 5.0  # that --once waits for figures
_KEYS = "q leaves  space stops the picture  ↑ ↓ request  ← → run"
_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}  # by the last letter of what a terminal sends


@dataclass(frozen=True)
class TopFlags:
    """Which runs are shown, and how."""

    redis: Redis = None
    runs: Annotated[
        tuple[str, ...],
        Help("A run on that Redis, or on another as URL#NAME; may be repeated.", "NAME", "--run", repeated=True),
    ] = ()
    running: Annotated[bool, Help("The cluster that pipedec up started here, which is also the default.")] = False
    recording: Annotated[Path | None, Help("Play what was recorded, at the speed of the recording.", "FILE")] = None
    once: Annotated[bool, Help("Print one picture, without waiting for changes, and leave.")] = False
    json: Annotated[bool, Help("Print every frame as a line of JSON; with --once a line for each run.")] = False


@click.command()
@options_of(TopFlags, "asked")
def top(asked: TopFlags) -> None:
    """Watch runs think: stages and timesteps, verdicts, answers as they grow, and figures. Ctrl-C or q leaves.

    Any number of runs: --run may be repeated. What --json prints is a recording, which --recording plays, as does the page /live.
    """
    if asked.recording is not None and (asked.redis is not None or asked.runs or asked.running):
        raise UserError("--recording plays a file: leave out --redis, --run and --running")
    if not (asked.once or asked.json or sys.stdout.isatty()):
        raise UserError("standard output is no terminal: give --once for one picture, or --json for all frames")
    raise_missed = Interrupts().raise_missed
    with suppress(KeyboardInterrupt), _sources(asked) as sources:
        if asked.once:
            _print_once(sources, asked.json)
        elif asked.json:
            _print_frames(sources, raise_missed)
        else:
            _Screen(sources, Console(highlight=False)).run(raise_missed)


@contextmanager
def _sources(asked: TopFlags) -> Iterator[list[Source]]:
    sources: list[Source] = []
    try:
        if asked.recording is not None:
            sources.append(Recording(asked.recording, asked.once or asked.json))
        else:
            sources += [RunSource(find_run(*_place(asked.redis, name))) for name in asked.runs or (None,)]
        yield sources
    finally:
        for source in sources:
            source.close()


def _place(redis: str | None, run: str | None) -> tuple[str | None, str | None]:
    """The Redis server and the name of a run that is named as NAME, or as URL#NAME."""
    if run is None or "://" not in run:
        return redis, run
    url, _, name = run.rpartition("#")
    return (url, name) if url else (run, None)


def _print_once(sources: Sequence[Source], as_json: bool) -> None:
    """A picture, or a document, of every run, as soon as there are figures."""
    deadline = time.monotonic() + _FIRST_SECONDS
    for source in sources:
        source.take()
        while not (source.is_complete() or source.has_ended()) and time.monotonic() < deadline:
            time.sleep(_REDRAW_SECONDS)
            source.take()
    console = Console(highlight=False)
    for shown in (shown for source in sources for shown in source.runs):
        if as_json:
            print(json.dumps(described(shown)))
        else:
            console.print(panel(shown, console.width, None, _shows_colour(console)))


def _print_frames(sources: Sequence[Source], raise_missed: Callable[[], None]) -> None:
    """Every frame, until all runs have ended."""
    while True:
        raise_missed()
        has_ended = all(source.has_ended() for source in sources)
        for frame in (frame for source in sources for frame in source.take()):
            print(json.dumps(frame, ensure_ascii=False, separators=(",", ":")))
        sys.stdout.flush()
        if has_ended:
            return
        time.sleep(_REDRAW_SECONDS)


def described(shown: Shown) -> dict[str, Any]:
    """A run as one JSON document."""
    run = shown.run
    about = {name: run.about.get(name) for name in ("epoch", "stages", "groups", "target", "draft", "emulated", "method")}
    requests = [
        {
            "number": request.number,
            "method": request.method,
            "tokens": request.tokens,
            "text": request.text,
            "end": request.reason,
        }
        for request in run.requests.values()
    ]
    ranks = None if shown.ranks is None else {"alive": shown.ranks[0], "all": shown.ranks[1]}
    state = {"run": run.name, "state": shown.state, "note": shown.note or None, "ranks": ranks}
    return state | about | {"stats": None if run.stats is None else asdict(run.stats), "requests": requests}


class _Screen:
    """The picture, drawn again while there is news, and the keys."""

    def __init__(self, sources: Sequence[Source], console: Console) -> None:
        self._sources = sources
        self._console = console
        self._chosen = 0  # run
        self._stopped: list[Shown] | None = None  # the runs as they were then
        self._drawn = 0.0

    def run(self, raise_missed: Callable[[], None]) -> None:
        """Until q is pressed, or ``raise_missed`` raises."""
        with _keys() as pressed, Live(console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                raise_missed()
                if self._take():
                    live.update(self._picture(), refresh=True)
                for key in pressed(_REDRAW_SECONDS):
                    if key == "q":
                        return
                    self._press(key)

    def _take(self) -> bool:
        """Take what has come, also while the picture is stopped; whether it is time to draw."""
        has_news = any([source.take() for source in self._sources]) and self._stopped is None
        now = time.monotonic()
        if not has_news and now < self._drawn + _LOOK_SECONDS:
            return False
        self._drawn = now
        return True

    def _picture(self) -> Group:
        width, height = self._console.size
        foot = Text(f"{'' if self._stopped is None else 'STOPPED  '}{_KEYS}   {LEGEND}", "dim", no_wrap=True)
        foot.truncate(width, overflow="ellipsis")
        return Group(screen(self._shown(), self._chosen, width, height - 1, _shows_colour(self._console)), foot)

    def _shown(self) -> list[Shown]:
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
            _choose_next(self._shown()[self._chosen], key == "up")


def _choose_next(shown: Shown, backwards: bool) -> None:
    """Show another request of the run in full."""
    present = shown.request()
    if present is not None:
        numbers = list(shown.run.requests)[:: -1 if backwards else 1]
        shown.chosen = next(islice(cycle(numbers), numbers.index(present.number) + 1, None))


def _shows_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


@contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """Yields a function that waits for keys, for so many seconds at most. The terminal is as it was afterwards."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    descriptor = sys.stdin.fileno()
    usual = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: _pressed(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, usual)


def _no_keys(seconds: float) -> list[str]:
    time.sleep(seconds)
    return []


def _pressed(descriptor: int, seconds: float) -> list[str]:
    if not select.select([descriptor], [], [], seconds)[0]:
        return []
    typed = os.read(descriptor, 64).decode(errors="ignore")
    if not typed:
        time.sleep(seconds)  # the terminal is gone
    pressed = re.findall(r"\x1b[\[O][A-D]|.", typed, re.DOTALL)
    return [_ARROWS[key[-1]] if len(key) > 1 else key for key in pressed]
