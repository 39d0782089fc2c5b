"""``pipedec top``: what runs do, drawn on a terminal while they do it, from their live feeds; or from a recording of these."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any

import click
from rich.console import Console

from pipedec.cli.options import Redis
from pipedec.cli.show import Interrupts
from pipedec.client.running import Running
from pipedec.client.watch import RunWatch
from pipedec.cluster.state import RunningCluster, find_run
from pipedec.core.errors import PipedecError, RankLost, UserError
from pipedec.flags import Help, options_of
from pipedec.live.reading import RecordedFrames
from pipedec.live.terminal import REDRAW_SECONDS, Screen, Source, panel, shows_colour
from pipedec.live.view import Frame, RunView, ShownRun
from pipedec.scheduler import ClientScheduler

_AGAIN_SECONDS = 0.5  # until the state is asked for again, or a feed that has broken
_FIRST_SECONDS = 5.0  # that --once waits for figures


@dataclass(frozen=True)
class TopFlags:
    redis: Redis = None
    runs: Annotated[
        tuple[str, ...],
        Help("Run to show: its name on that Redis, or URL#NAME on another one; may be repeated.", "NAME", "--run", repeated=True),
    ] = ()
    running: Annotated[bool, Help("The cluster that pipedec up started here, which is also the default.")] = False
    recording: Annotated[Path | None, Help("Play a recording at its original speed.", "FILE")] = None
    once: Annotated[bool, Help("Print one picture without waiting for changes, and exit.")] = False
    json: Annotated[bool, Help("Print every frame as a line of JSON; with --once a line for each run.")] = False


@click.command()
@options_of(TopFlags, "asked")
def top(asked: TopFlags) -> None:
    """Watch runs: stages and timesteps, verdicts, answers as they grow, and figures. Ctrl-C or q leaves.

    Any number of runs: --run may be repeated. What --json prints is a recording, which --recording plays, as does the page /live.
    """
    if asked.recording is not None and (asked.redis is not None or asked.runs or asked.running):
        raise UserError("--recording plays a file: leave out --redis, --run and --running")
    if not (asked.once or asked.json or sys.stdout.isatty()):
        raise UserError("standard output is no terminal: give --once for one picture, or --json for all frames")
    raise_missed = Interrupts().raise_missed
    with suppress(KeyboardInterrupt), ExitStack() as opened:
        sources: list[Source] = []
        if asked.recording is not None:
            sources.append(RecordedFrames(asked.recording, asked.once or asked.json))
        else:
            for name in asked.runs or (None,):  # NAME, or URL#NAME
                redis, run = asked.redis, name
                if name is not None and "://" in name:
                    url, _, after = name.rpartition("#")
                    redis, run = (url, after) if url else (name, None)
                sources.append(RunSource(find_run(redis, run)))
        for source in sources:
            opened.enter_context(closing(source))
        if asked.once:
            _print_once(sources, asked.json)
        elif asked.json:
            _print_frames(sources, raise_missed)
        else:
            Screen(sources, Console(highlight=False)).run(raise_missed)


def _print_once(sources: Sequence[Source], as_json: bool) -> None:
    """A picture, or a document, of every run, as soon as there are figures."""
    deadline = time.monotonic() + _FIRST_SECONDS
    for source in sources:
        source.take()
        while not (source.is_complete() or source.has_ended()) and time.monotonic() < deadline:
            time.sleep(REDRAW_SECONDS)
            source.take()
    console = Console(highlight=False)
    for shown in (shown for source in sources for shown in source.runs):
        if as_json:
            print(json.dumps(described(shown)))
        else:
            console.print(panel(shown, console.width, None, shows_colour(console)))


def _print_frames(sources: Sequence[Source], raise_missed: Callable[[], None]) -> None:
    """Every frame, until all runs have ended."""
    while True:
        raise_missed()
        has_ended = all(source.has_ended() for source in sources)
        for frame in (frame for source in sources for frame in source.take()):
            print(json.dumps(frame, separators=(",", ":")))
        sys.stdout.flush()
        if has_ended:
            return
        time.sleep(REDRAW_SECONDS)


def described(shown: ShownRun) -> dict[str, Any]:
    run = shown.run
    about = {name: run.about.get(name) for name in ("epoch", "stages", "groups", "target", "draft", "emulated", "method")}
    requests = [
        {"number": one.number, "method": one.method, "tokens": one.tokens, "text": one.text, "end": one.reason}
        for one in run.requests.values()
    ]
    ranks = None if shown.ranks is None else {"alive": shown.ranks[0], "all": shown.ranks[1]}
    state = {"run": run.name, "state": shown.state, "note": shown.note or None, "ranks": ranks}
    return state | about | {"stats": None if run.stats is None else asdict(run.stats), "requests": requests}


class RunSource:
    """A run in a cluster, which two threads follow until it ends: one its feed, one its state.

    UserError if there is no such run, or another version runs it; SchedulerLost if Redis cannot be reached.
    """

    def __init__(self, found: RunningCluster) -> None:
        running = Running.of(found.connect(), found.run_id)
        shown = ShownRun(RunView(found.run_id))
        about = running.description
        shown.run.about = {
            "stages": len(about.layers), "groups": len(about.groups), "target": about.target, "draft": about.draft,
            "emulated": about.emulation, "epoch": 0,
        }  # fmt: skip
        self.runs = [shown]
        self._running = running
        self._watch = RunWatch()
        self._frames: SimpleQueue[Frame] = SimpleQueue()
        self._is_closed = False
        for follow in (self._follow_feed, self._follow_state):
            threading.Thread(target=self._until_ended, args=(follow, found.connect()), daemon=True).start()

    def take(self) -> list[Frame]:
        """See ``Source``. Raises UserError for frames of another version."""
        taken = []
        with suppress(Empty):
            while True:
                taken.append(self._frames.get_nowait())
                self.runs[0].run.take(taken[-1])
        return taken

    def is_complete(self) -> bool:
        return self.runs[0].run.stats is not None and bool(self.runs[0].state)

    def has_ended(self) -> bool:
        return self.runs[0].state == "ended"

    def close(self) -> None:
        self._is_closed = True

    def _until_ended(self, follow: Callable[[ClientScheduler], None], scheduler: ClientScheduler) -> None:
        while not (self._is_closed or self.has_ended()):
            follow(scheduler)
            time.sleep(_AGAIN_SECONDS)

    def _follow_feed(self, scheduler: ClientScheduler) -> None:
        with suppress(PipedecError):  # the state has the reason
            for frame in Running.of(scheduler, self._running.run_id).client.live():
                self._frames.put(frame)
                if self._is_closed:
                    return

    def _follow_state(self, scheduler: ClientScheduler) -> None:
        shown = self.runs[0]
        try:
            status = scheduler.status()
        except PipedecError as error:  # Redis, or the run in it, is away, perhaps for good
            shown.note = str(error)
            try:
                self._watch.outage(error)
            except PipedecError:
                shown.state = "ended"
            return
        shown.ranks = len(status.alive), len(self._running.topology.ranks)
        try:
            self._watch.check(status)
        except RankLost as error:
            shown.state, shown.note = "ended", "the run was stopped" if status.state == "gone" else str(error)
        else:
            shown.state, shown.note = "recovering" if status.is_recovering else status.state, ""
