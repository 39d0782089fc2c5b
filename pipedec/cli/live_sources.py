"""Where the frames of ``pipedec top`` come from: runs in clusters, and recordings."""

from __future__ import annotations

import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from pipedec.cli.live_panels import Shown
from pipedec.client.live_view import Frame, LiveView, RunView
from pipedec.client.running import Running
from pipedec.client.watch import RunWatch, is_away
from pipedec.cluster.state import RunningCluster
from pipedec.core import PipedecError, RankLost, UserError
from pipedec.messages import RunDescription
from pipedec.scheduler import ClientScheduler, RunStatus

_AGAIN_SECONDS = 0.5  # until the state is asked for again, or a feed that has broken


class Source(Protocol):
    """Where frames come from.

    Attributes:
        runs: what there is to draw of them.
    """

    runs: list[Shown]

    def take(self) -> list[Frame]:
        """Add the frames that have come since the last call to ``runs``, and return them."""

    def is_complete(self) -> bool:
        """Whether everything that can be drawn now is there."""

    def has_ended(self) -> bool:
        """Whether no more frames come."""

    def close(self) -> None:
        """Nothing is drawn any more."""


class RunSource:
    """A run in a cluster, which two threads follow until it ends: one its feed, one its state.

    Raises:
        UserError: there is no such run, or another version runs it.
        SchedulerLost: Redis cannot be reached.
    """

    def __init__(self, found: RunningCluster) -> None:
        running = Running.of(found.connect(), found.run_id)
        shown = Shown(RunView(found.run_id))
        shown.run.about = _about(running.description)
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
        with suppress(PipedecError):  # the state tells why
            for frame in Running.of(scheduler, self._running.run_id).client.live():
                self._frames.put(frame)
                if self._is_closed:
                    return

    def _follow_state(self, scheduler: ClientScheduler) -> None:
        try:
            self._show_state(scheduler.status())
        except PipedecError as error:
            self._bear(error)

    def _show_state(self, status: RunStatus) -> None:
        shown = self.runs[0]
        shown.ranks = len(status.alive), len(self._running.topology.ranks)
        try:
            self._watch.check(status)
        except RankLost as error:
            shown.state, shown.note = "ended", "the run was stopped" if status.state == "gone" else str(error)
        else:
            shown.state, shown.note = "recovering" if is_away(status) else status.state, ""

    def _bear(self, error: PipedecError) -> None:
        """Redis, or the run in it, is away, perhaps for good."""
        self.runs[0].note = str(error)
        try:
            self._watch.outage(error)
        except PipedecError:
            self.runs[0].state = "ended"


class Recording:
    """Frames of a file, of one or several runs, as fast as they were.

    Raises:
        UserError: the file cannot be read, or is no recording.
    """

    def __init__(self, path: Path, at_once: bool = False) -> None:
        self._frames = sorted(_timed(read_recording(path)), key=lambda timed: timed[0])
        self._view = LiveView()
        self._played = 0
        self._began = -float("inf") if at_once else time.monotonic()
        for name in dict.fromkeys(frame["run"] for _, frame in self._frames):
            self._view.runs[name] = RunView(name)
        self.runs = [Shown(run, "recording") for run in self._view.runs.values()]

    def take(self) -> list[Frame]:
        """See ``Source``. Raises UserError for frames of another version."""
        now, first = time.monotonic() - self._began, self._played
        while self._played < len(self._frames) and self._frames[self._played][0] <= now:
            self._view.take(self._frames[self._played][1])
            self._played += 1
        return [frame for _, frame in self._frames[first : self._played]]

    def is_complete(self) -> bool:
        return True

    def has_ended(self) -> bool:
        return self._played == len(self._frames)

    def close(self) -> None:
        """It holds nothing."""


def read_recording(path: Path) -> list[Frame]:
    """The frames of a recording: JSON Lines, which may be compressed by gzip. Raises UserError if it is none."""
    try:
        raw = path.read_bytes()
        lines = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode().splitlines()
        frames = [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise UserError(f"--recording {path}: {error.strerror or 'it is damaged'}") from None
    except (ValueError, EOFError, zlib.error):
        frames = []
    if not frames or not all(isinstance(frame, dict) and "k" in frame and "run" in frame for frame in frames):
        raise UserError(f"--recording {path} is no recording: save one on the page /live, or with pipedec top --json")
    return frames


def _timed(frames: Sequence[Frame]) -> Iterator[tuple[float, Frame]]:
    """Frames and when they come, in seconds since the first step of all; one without a time comes with the one before it."""
    begins = min((frame["us"] for frame in frames if "us" in frame and frame["k"] != "run"), default=0)
    now: dict[str, float] = {}
    for frame in frames:
        if "us" in frame and frame["k"] != "run":
            now[frame["run"]] = (frame["us"] - begins) / 1e6
        yield now.get(frame["run"], 0.0), frame


def _about(description: RunDescription) -> Mapping[str, Any]:
    """What is known of a run before its first frame."""
    return {
        "stages": len(description.layers), "groups": len(description.groups), "target": description.target,
        "draft": description.draft, "emulated": description.emulation, "epoch": 0,
    }  # fmt: skip
