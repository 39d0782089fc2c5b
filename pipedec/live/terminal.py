"""Runs on a terminal: the picture of what ``view`` knows of them, drawn anew while there is news, and the keys that steer it.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import groupby
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from pipedec.live.view import Frame, RequestView, ShownRun

REDRAW_SECONDS = 0.1
_LOOK_SECONDS = 0.5  # between two pictures without news: states change, and the size of the terminal
_KEYS = "q leaves  space stops the picture  ↑ ↓ request  ← → run"
_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}  # by the last letter of what a terminal sends
LEGEND = "█ rows in flight  ░ pruned  ▒ prompt  ● hit  × miss  ┊ what may follow"
_COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#8e9bff")  # of requests, distinct for colour-blind readers
_VOID = "#707070"
_BARS = "▁▂▃▄▅▆▇█"
_BORDERS = {"up": "green", "recovering": "yellow", "stopping": "yellow"}
_PANEL_LINES = 11  # fewer make no panel
_MOST_LINES = 60
_ANSWER_LINES = 4  # of the chosen request


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
                    width, height = self._console.size
                    foot = Text(f"{'' if self._stopped is None else 'STOPPED  '}{_KEYS}   {LEGEND}", "dim", no_wrap=True)
                    foot.truncate(width, overflow="ellipsis")
                    runs = screen(self._shown(), self._chosen, width, height - 1, shows_colour(self._console))
                    live.update(Group(runs, foot), refresh=True)
                for key in pressed(REDRAW_SECONDS):
                    if key == "q":
                        return
                    self._press(key)

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
    is_terminal = sys.stdin.isatty()
    descriptor = sys.stdin.fileno() if is_terminal else -1

    def wait(seconds: float) -> list[str]:
        if is_terminal and not select.select([descriptor], [], [], seconds)[0]:
            return []
        typed = os.read(descriptor, 64).decode(errors="ignore") if is_terminal else ""
        if not typed:
            time.sleep(seconds)  # there is no terminal, or it is gone
        pressed = re.findall(r"\x1b[\[O][A-D]|.", typed, re.DOTALL)
        return [_ARROWS[key[-1]] if len(key) > 1 else key for key in pressed]

    if not is_terminal:
        yield wait
        return
    usual = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, usual)


def screen(runs: Sequence[ShownRun], chosen: int, width: int, height: int, halves: bool) -> Group:
    """All runs in ``height`` lines: a panel for each, or one for the chosen run and a line for each other.

    ``halves``: two stages may share a line where lines are short, distinguished by colour alone.
    """
    lines = height // max(1, len(runs))
    if lines >= _PANEL_LINES or len(runs) == 1:
        return Group(*(panel(shown, width, lines, halves, index == chosen) for index, shown in enumerate(runs)))
    above = [summary(shown, width) for index, shown in enumerate(runs) if index != chosen][: max(0, height - _PANEL_LINES)]
    return Group(*above, panel(runs[chosen], width, height - len(above), halves, True))


def summary(shown: ShownRun, width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(printable(shown.run.name), "bold")
    line.append(f"  {shown.state}", _BORDERS.get(shown.state, "red"))
    for figure in [shown.note] if shown.state == "ended" else _figures(shown):
        line.append("  ").append(figure)
    line.truncate(width, overflow="ellipsis")
    return line


def panel(shown: ShownRun, width: int, height: int | None, halves: bool, is_chosen: bool = True) -> Panel:
    """A run in ``height`` lines, or in as many as it needs, and ``width`` columns."""
    inner, room = width - 4, (_MOST_LINES if height is None else height) - 2
    head = [*_flow(_figures(shown), inner), *_flow(_speculation(shown), inner), *_incidents(shown, inner)]
    requests = min(len(shown.run.requests) + _ANSWER_LINES, max(2, room - len(head) - shown.run.groups - 1))
    stages = _grid(shown, inner, room - len(head) - requests, halves)
    lines = [*head, *stages]
    lines += _requests(shown, inner, room - len(lines))
    border = _BORDERS.get(shown.state, "red" if shown.state == "ended" else "dim")
    return Panel(
        Group(*lines[:room]), title=_title(shown, inner), title_align="left", height=height, width=width,
        border_style=border if is_chosen else f"{border} dim",
    )  # fmt: skip


def printable(text: str) -> str:
    """Text of models and users as it may be written to a terminal: without control characters."""
    return "".join(letter if letter.isprintable() else "⏎" if letter == "\n" else " " for letter in text)


def _title(shown: ShownRun, width: int) -> Text:
    about = shown.run.about
    stages = about.get("stages", 0)
    groups = f" in {shown.run.groups} groups" if shown.run.groups not in (0, stages) else ""
    target = "/".join((about.get("target") or "").rstrip("/").split("/")[-2:])
    size = f"{stages} stages{groups}" if stages else ""
    parts = [shown.run.name, shown.state, size, about.get("emulated"), about.get("method"), target]
    title = Text(" · ".join(printable(part) for part in parts if part))
    title.truncate(width - 2, overflow="ellipsis")
    return title


def _figures(shown: ShownRun) -> list[str]:
    """How much there is to do, and how fast it is done."""
    stats, figures = shown.run.stats, []
    if shown.ranks is not None:
        figures.append(f"{shown.ranks[0]} of {shown.ranks[1]} ranks alive")
    if stats is None:
        return figures if shown.state == "recording" else [*figures, "waiting for its figures"]
    filled = round(8 * min(1.0, max(0.0, stats.kv)))
    bar = "█" * filled + "░" * (8 - filled)
    figures += [f"{stats.running} running", f"{stats.waiting} waiting", f"KV {bar} {stats.kv:.0%}"]
    figures.append(f"{stats.tokens_per_s:.1f} tokens/s")
    figures += [
        f"{name} {value:.0f} ms" for name, value in (("TTFT", stats.ttft_ms), ("TPOT", stats.tpot_ms)) if value is not None
    ]
    return figures


def _speculation(shown: ShownRun) -> list[str]:
    stats = shown.run.stats
    if stats is None:
        return []
    figures = [] if stats.hit_rate is None else [f"hits {stats.hit_rate:.0%}"]
    if stats.acceptance:
        bars = "".join(_BARS[min(7, int(rate * 8))] for rate in stats.acceptance)
        figures.append(f"accepted by position {bars} (first {stats.acceptance[0]:.0%})")
    return figures


def _incidents(shown: ShownRun, width: int) -> list[Text]:
    """Failures, dropped frames and recoveries, a line each."""
    stats, lines = shown.run.stats, []
    if shown.note:
        lines.append(_cropped(shown.note, width, "red"))
    if shown.run.dropped:
        lines.append(_cropped(f"{shown.run.dropped} frames were dropped: this terminal is too slow", width, "yellow"))
    if stats is not None and stats.recoveries:
        last = stats.recoveries[-1]
        took = "not served yet" if last.get("seconds") is None else f"went on after {last['seconds']:.1f} s"
        count = len(stats.recoveries)
        text = f"epoch {last.get('epoch')}: {last.get('reason')}; {took}" + (f" ({count} recoveries)" if count > 1 else "")
        lines.append(_cropped(text, width, "yellow"))
    return lines


def _grid(shown: ShownRun, width: int, lines: int, halves: bool) -> list[Text]:
    """Stages × timesteps, the newest at the right, and a line of verdicts; at most ``lines`` of them."""
    run = shown.run
    if not run.groups or lines < 2:
        return []
    shared = 2 if run.groups > lines - 1 and halves else 1  # stages in a line
    name = "stage" if run.about.get("stages") == run.groups else "group"
    label = len(f"{name} {run.groups}-{run.groups} " if shared == 2 else f"{name} {run.groups} ")
    timesteps = range(run.timestep - max(1, width - label) + 1, run.timestep + 1)
    drawn = []
    for first in range(0, min(run.groups, (lines - 1) * shared), shared):
        groups = range(first, min(first + shared, run.groups))
        cells = (_cell([_part(shown, timestep, group) for group in groups]) for timestep in timesteps)
        drawn.append(_line(f"{name} {'-'.join(str(group + 1) for group in groups)}", label, cells))
    return [*drawn, _line("verdict"[:label], label, (_verdict(shown, timestep) for timestep in timesteps))]


def _line(name: str, label: int, cells: Iterable[tuple[str, str]]) -> Text:
    """Cells after a name that takes ``label`` columns. Cells that look alike are one piece, which is faster to draw."""
    pieces = ((letter * len(list(alike)), style) for (letter, style), alike in groupby(cells))
    return Text.assemble(name.ljust(label), *pieces, no_wrap=True)


def _part(shown: ShownRun, timestep: int, group: int) -> tuple[str, str]:
    """The letter and the colour of a stage group at a timestep. Of several requests it is the chosen one, or else one after the
    other, the same in all stages.
    """
    shares = shown.run.cell(timestep, group)
    if not shares:
        return " ", ""
    busy = [number for number, share in shares.items() if share.live or share.prompt]
    if not busy or (shown.chosen in shares and shown.chosen not in busy):
        return "░", _VOID
    number = shown.chosen if shown.chosen in busy else busy[(timestep - group) % len(busy)]
    return ("█" if shares[number].live else "▒"), _colour(number)


def _cell(parts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """One letter and its style for one stage group, or for two above each other."""
    if len(parts) == 1:
        return parts[0]
    (_, upper), (_, lower) = parts
    if not upper:
        return ("▄", lower) if lower else (" ", "")
    return "▀", upper + (f" on {lower}" if lower else "")


def _verdict(shown: ShownRun, timestep: int) -> tuple[str, str]:
    column, full = shown.run.columns.get(timestep), shown.request()
    if column is None or not column.hits:
        return " ", ""
    number = full.number if full is not None and full.number in column.hits else next(iter(column.hits))
    return ("●", _colour(number)) if column.hits[number] else ("×", "bold red")


def _requests(shown: ShownRun, width: int, lines: int) -> list[Text]:
    """The request that is shown in full, then the others that run, then those that have ended."""
    full = shown.request()
    if full is None:
        return [Text("no request has come yet", "dim")][:lines]
    others = [other for other in shown.run.requests.values() if other is not full]
    others.sort(key=lambda other: (other.reason is not None, other.number if other.reason is None else -other.number))
    answer = min(_ANSWER_LINES, max(1, lines - 1 - len(others)))
    hits = f"hits {full.hits / full.judged:.0%}" if full.judged else ""
    parts = [f"▸ {full.number}", full.method, f"{full.tokens} tokens", hits, full.reason, printable(full.prompt)]
    about = _cropped("  ".join(part for part in parts if part), width, f"bold {_colour(full.number)}")
    guesses = printable("".join(row.text for row in full.likely())) if full.reason is None else ""
    ahead = Text().append(f"┊{guesses}" if guesses else "", "dim italic")  # the most likely continuation
    ahead.truncate(max(1, width * answer // 2), overflow="ellipsis")
    accepted = _tail(full, width * answer - cell_len(ahead.plain) - answer)
    drawn = [about, *[*_wrapped(accepted.append_text(ahead), width)][-answer:]]
    for other in others[: max(0, lines - len(drawn))]:
        head = f"  {other.number}  " + ("" if other.reason is None else f"{other.reason}  ")
        drawn.append(Text().append(head, _style(other)).append_text(_tail(other, width - cell_len(head))))
    return drawn


def _tail(request: RequestView, width: int) -> Text:
    """The last ``width`` columns of an answer; tokens that were in flight before they were accepted have its colour."""
    kept: list[tuple[str, str]] = []
    for span in reversed(request.spans):
        text = printable(span.text)
        start = len(text)
        while start > 0 and (cells := cell_len(text[start - 1])) <= width:
            start -= 1
            width -= cells
        kept.append((text[start:], _style(request) if span.was_in_flight else ""))
        if start > 0:
            break
    return Text.assemble(*reversed(kept))


def _style(request: RequestView) -> str:
    return "dim" if request.reason is not None else _colour(request.number)


def _wrapped(text: Text, width: int) -> Iterable[Text]:
    """Lines of at most ``width`` columns, between words where that can be."""
    start, used = 0, 0
    for place, letter in enumerate(text.plain):
        used += cell_len(letter)
        if used > width:
            space = text.plain.rfind(" ", start, place)
            end = place if space <= start else space + 1
            yield text[start:end]
            start, used = end, cell_len(text.plain[end : place + 1])
    yield text[start:]


def _flow(parts: Sequence[str], width: int) -> list[Text]:
    """Figures beside each other, in as many lines as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + 3 + cell_len(part) <= width:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    return [_cropped(line, width) for line in lines]


def _cropped(text: str, width: int, style: str = "") -> Text:
    line = Text(printable(text), style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
