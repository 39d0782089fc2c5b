"""``pipedec top``: a running cluster as a table that is renewed every second, or all frames of its live feed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Annotated

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipedec.cli.options import ClusterFlags, cluster_options
from pipedec.cli.show import Interrupts
from pipedec.cli.show import console as progress
from pipedec.client.run_handle import RunHandle
from pipedec.core.errors import PipedecError, SchedulerLost, UserError
from pipedec.flags import Help, own_options
from pipedec.live.reading import Frame, GoingOn
from pipedec.scheduler import ClientScheduler

_ANSWER = 60  # characters at the end of an answer that are shown


@click.command()
@cluster_options
@own_options
def top(
    place: ClusterFlags,
    once: Annotated[bool, Help("Exit after a second, with one table.")] = False,
    as_json: Annotated[bool, Help("Print every frame as a line of JSON: a recording for the page /live.", flag="--json")] = False,
) -> None:
    """Watch a running cluster: its figures, what its ranks do, and its requests as they are answered. Ctrl-C leaves."""
    if not (once or as_json or sys.stdout.isatty()):
        raise UserError("standard output is no terminal: give --once for one table, or --json for all frames")
    interrupts, found, console = Interrupts(), place.find(), Console(highlight=False)
    run, num_figures = _WatchedRun(found.run_id, found.connect()), 0
    screen: AbstractContextManager[Live | None] = nullcontext()
    if not (once or as_json):
        screen = Live(console=console, auto_refresh=False)
    with suppress(KeyboardInterrupt), screen as live:
        for frame in run.frames():
            interrupts.raise_missed()
            if as_json:
                print(json.dumps(frame, separators=(",", ":")))
            if frame["k"] == "stats":
                sys.stdout.flush()
                num_figures += 1
                if live is not None:
                    live.update(run.table(), refresh=True)
                if once and num_figures == 2:  # the first have no time before them to cover
                    break
        if once and not as_json:
            console.print(run.table())


class _WatchedRun:
    """A run, and what its feed has shown. Raises UserError if it has ended, or another version runs it."""

    def __init__(self, run_id: str, scheduler: ClientScheduler) -> None:
        self._running = RunHandle.of(scheduler, run_id)
        self._scheduler, self._status = scheduler, scheduler.status()
        self._going_on = GoingOn()
        self._num_tokens: Counter[int] = Counter()  # by request, since it or watching began
        self._figures: Frame = {}
        self._doing = scheduler.activities()

    def frames(self) -> Iterator[Frame]:
        """Frames until the run has ended, or Redis is away for long; then says so."""
        client = self._running.client
        try:
            for frame in client.live():
                if frame["k"] == "stats":
                    self._figures, self._status = frame, client.last_status or self._status
                    with suppress(SchedulerLost):  # the feed waits for a Redis that is away
                        self._doing = self._scheduler.activities()
                self._going_on.on_frames([frame])
                if frame["k"] == "open":
                    self._num_tokens[frame["r"]] = 0
                for verdict in frame.get("out", ()):
                    self._num_tokens[verdict["r"]] += len(verdict["tokens"])
                yield frame
        except PipedecError as error:
            progress.print(f"The run {self._running.run_id} has ended: {error}.", soft_wrap=True)

    def table(self) -> Group:
        """The run in some lines, and a line for each of its requests."""
        status, figures, about = self._status, self._figures, self._running.description
        state = "recovering" if status.is_recovering else status.state
        ranks = f"{len(status.alive)} of {len(about.layers) + 1} ranks alive"
        passage = f", passage {status.stats.passage} timesteps" if status.stats and status.stats.passage else ""
        speeds = [
            text.format(figures[name])
            for name, text in (("ttft_ms", "TTFT {:.0f} ms"), ("tpot_ms", "TPOT {:.0f} ms"), ("hit_rate", "hits {:.0%}"))
            if figures.get(name) is not None
        ]
        parts = [
            f"{figures.get('running', 0)} running, {figures.get('waiting', 0)} waiting", f"KV {figures.get('kv', 0.0):.0%}",
            f"{figures.get('tokens_per_s', 0.0):.1f} tokens/s", *speeds,
        ]  # fmt: skip
        lines = [
            f"run {self._running.run_id}: {state}, epoch {status.epoch}, {ranks}",
            f"{len(about.layers)} stages in {len(about.groups)} groups{passage}",
            "; ".join(parts),
            "; ".join(f"rank {rank} {activity}" for rank, activity in sorted(self._doing.items())),
        ]
        rows = Table("request", "method", "tokens", "answer", box=None, pad_edge=False)
        for number, opened in self._going_on.open.items():
            answer = "".join(letter if letter.isprintable() else " " for letter in opened["said"][-_ANSWER:])
            rows.add_row(str(number), opened["method"], str(self._num_tokens[number]), Text(answer))
        return Group(*map(Text, lines), rows)
