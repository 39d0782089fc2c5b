"""Reading the live feed (docs/live.md) of a run, with figures once a second, and recordings of it in files.

Blocking and asyncio readers share this; it has no connection.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from pipedec.core.errors import UserError
from pipedec.live.view import Frame, RunView, ShownRun
from pipedec.scheduler import FrameBatch, RunStatus

STATS_SECONDS = 1.0  # between two frames of figures, and two renewals of the watcher's lease
READ_SECONDS = 0.5  # that a read waits
_REMEMBERED = 200  # tokens that the hit rate covers


class LiveReading:
    """The state of one reader of the feed of ``run``."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._number: int | None = None  # of the last batch
        self._hits: deque[bool] = deque(maxlen=_REMEMBERED)
        self._opened: dict[int, int] = {}  # when requests without tokens were opened, in µs
        self._first: dict[int, tuple[int, int]] = {}  # of running requests: time of their first tokens, and number of tokens
        self._ttft_ms: float | None = None
        self._tpot_ms: float | None = None
        self._tokens = 0  # that were accepted
        self._last: tuple[int, int] | None = None  # when the last figures were made, in µs, and the tokens by then

    def missed(self, shown: FrameBatch) -> Frame | None:
        """A frame that reports missing batches before this one."""
        expected = shown.number if self._number is None or shown.number < self._number else self._number + 1
        self._number = shown.number
        return None if shown.number == expected else {"k": "gap", "run": self._run, "dropped": shown.number - expected}

    def take(self, shown: FrameBatch) -> list[Frame]:
        frames: list[Frame] = json.loads(shown.frames)
        self.note(frames)
        return frames

    def note(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self._last = self._last or (frame["us"], 0)
            if frame["k"] == "open":
                self._opened[frame["r"]] = frame["us"]
            elif frame["k"] == "close":
                self._opened.pop(frame["r"], None)
                self._first.pop(frame["r"], None)
            elif frame["k"] == "step":
                for verdict in frame["out"]:
                    self._count(verdict, frame["us"])

    def _count(self, verdict: Frame, now: int) -> None:
        number, tokens = verdict["r"], verdict["tokens"]
        self._tokens += len(tokens)
        if number not in self._first:
            self._first[number] = now, 0
            if (opened := self._opened.pop(number, None)) is not None:
                self._ttft_ms = (now - opened) / 1000
            return
        carried = [row is not None for _, _, row in tokens]
        self._hits += carried if any(carried) or not verdict["hit"] else []
        began, count = self._first[number]
        self._first[number] = began, count + len(tokens)
        self._tpot_ms = (now - began) / 1000 / (count + len(tokens))

    def stats(self, status: RunStatus, now_us: int | None = None) -> Frame:
        """The figures of the run, at present or, on emulated devices, at their time."""
        stats, now_us = status.stats, time.time_ns() // 1000 if now_us is None else now_us
        before, self._last = self._last or (now_us, 0), (now_us, self._tokens)
        rate = 1e6 * (self._tokens - before[1]) / max(now_us - before[0], 1)
        return {
            "k": "stats", "run": self._run, "us": now_us, "running": len(status.running),
            "waiting": status.waiting, "kv": 0.0 if stats is None else stats.kv.used / max(stats.kv.capacity, 1),
            "tokens_per_s": round(rate, 1), "ttft_ms": self._ttft_ms, "tpot_ms": self._tpot_ms,
            "acceptance": [] if stats is None else [count / max(stats.drafts, 1) for count in stats.accepted_per_pos],
            "hit_rate": sum(self._hits) / len(self._hits) if self._hits else None, "epoch": status.epoch,
            "recovering": status.is_recovering, "recoveries": [
                {"epoch": one.epoch, "lost": list(one.lost), "reason": one.reason, "seconds": one.seconds}
                for one in status.recoveries
            ],
        }  # fmt: skip


class RecordedFrames:
    """Frames of a file, of one or several runs, at their original speed. Raises as ``read_recording``."""

    def __init__(self, path: Path, at_once: bool = False) -> None:
        frames = read_recording(path)
        begins = min((frame["us"] for frame in frames if "us" in frame and frame["k"] != "run"), default=0)
        now: dict[str, float] = {}  # seconds since the first step of all; a frame without a time comes with the one before it
        timed = []
        for frame in frames:
            if "us" in frame and frame["k"] != "run":
                now[frame["run"]] = (frame["us"] - begins) / 1e6
            timed.append((now.get(frame["run"], 0.0), frame))
        self._frames = sorted(timed, key=lambda timed: timed[0])
        self._played = 0
        self._began = -float("inf") if at_once else time.monotonic()
        self._views = {name: RunView(name) for name in dict.fromkeys(frame["run"] for _, frame in self._frames)}
        self.runs = [ShownRun(run, "recording") for run in self._views.values()]

    def take(self) -> list[Frame]:
        """See ``Source``. Raises UserError for frames of another version."""
        now, first = time.monotonic() - self._began, self._played
        while self._played < len(self._frames) and self._frames[self._played][0] <= now:
            frame = self._frames[self._played][1]
            self._views[frame["run"]].take(frame)
            self._played += 1
        return [frame for _, frame in self._frames[first : self._played]]

    def is_complete(self) -> bool:
        return True

    def has_ended(self) -> bool:
        return self._played == len(self._frames)

    def close(self) -> None: ...


def read_recording(path: Path) -> list[Frame]:
    """The frames of a recording: JSON Lines, perhaps compressed by gzip. Raises UserError for any other file."""
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
