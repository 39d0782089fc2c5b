"""Reading the live feed (docs/live.md) of a run, with figures once a second. Blocking and asyncio readers share this; it has no
connection.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from pipedec.scheduler import FrameBatch, RunStatus

VERSION = 1  # version of the frames
Frame = dict[str, Any]

STATS_SECONDS = 1.0  # between two frames of figures, and two renewals of the watcher's lease
READ_SECONDS = 0.5  # how long a read waits
_REMEMBERED = 200  # tokens that the hit rate covers


class GoingOn:
    """The run that frames have shown and, by number, the ``open`` frames of its requests, with their answers so far."""

    def __init__(self) -> None:
        self._run: Frame | None = None
        self.open: dict[int, Frame] = {}

    def clear(self) -> None:
        self._run = None
        self.open.clear()

    def frames(self) -> list[Frame]:
        """Frames that describe it, without the rows in flight."""
        return [] if self._run is None else [self._run, *self.open.values()]

    def on_frames(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            match frame["k"]:
                case "run":
                    self._run = frame
                    self.open.clear()
                case "gap":
                    self.open.clear()
                case "open":
                    self.open[frame["r"]] = frame
                case "close":
                    self.open.pop(frame["r"], None)
                case "step":
                    for verdict in frame["out"]:
                        opened = self.open.get(verdict["r"])
                        if opened is not None and verdict["text"]:
                            self.open[verdict["r"]] = {**opened, "said": opened["said"] + verdict["text"]}


class LiveReading:
    """The state of one reader of the feed of ``run``.

    Attributes:
        position: of the last batch; empty if the reader has to begin.
        renewed: when its lease was renewed last, and figures were made; monotonic.
    """

    def __init__(self, run: str) -> None:
        self.position = ""
        self.renewed = -STATS_SECONDS
        self._run = run
        self._number: int | None = None  # the last batch's
        self._hits: deque[bool] = deque(maxlen=_REMEMBERED)
        self._opened: dict[int, int] = {}  # when requests without tokens were opened, in µs
        self._first: dict[int, tuple[int, int]] = {}  # by running request: time of its first tokens, and number of tokens
        self._ttft_ms: float | None = None
        self._tpot_ms: float | None = None
        self._tokens = 0  # accepted tokens
        self._last: tuple[int, int] | None = None  # when the last figures were made, in µs, and the tokens by then

    def missed(self, shown: FrameBatch) -> Frame | None:
        """A frame that reports missing batches before this one."""
        expected = shown.number if self._number is None or shown.number < self._number else self._number + 1
        self._number = shown.number
        return None if shown.number == expected else {"k": "gap", "run": self._run, "dropped": shown.number - expected}

    def on_batch(self, shown: FrameBatch) -> list[Frame]:
        frames: list[Frame] = json.loads(shown.frames)
        self.on_frames(frames)
        return frames

    def on_frames(self, frames: Sequence[Frame]) -> None:
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
