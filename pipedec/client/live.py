"""Reading the live feed of a run (docs/live.md): what rank 0 shows, and once a second what is known of the run.

Blocking and asyncio readers share this; it knows no connection.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pipedec.scheduler import RunStatus, Shown

STATS_SECONDS = 1.0  # between two frames of figures, and two renewals of the watcher's lease
READ_SECONDS = 0.5  # that a read waits
_REMEMBERED = 200  # tokens, of which the hit rate tells

Frame = dict[str, Any]


class LiveReading:
    """What a reader knows of the feed of ``run``."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._number: int | None = None  # of the last batch
        self._hits: deque[bool] = deque(maxlen=_REMEMBERED)
        self._opened: dict[int, int] = {}  # when requests without tokens were opened, in µs
        self._first: dict[int, tuple[int, int]] = {}  # of running requests: when their first tokens came, and how many have
        self._ttft_ms: float | None = None
        self._tpot_ms: float | None = None
        self._tokens = 0  # that were accepted
        self._told: tuple[int, int] | None = None  # when figures were told last, in µs, and how many tokens there were

    def missed(self, shown: Shown) -> Frame | None:
        """The frame that says that batches before this one are missing."""
        expected = shown.number if self._number is None or shown.number < self._number else self._number + 1
        self._number = shown.number
        return None if shown.number == expected else {"k": "gap", "run": self._run, "dropped": shown.number - expected}

    def take(self, shown: Shown) -> list[Frame]:
        """The frames of a batch."""
        frames: list[Frame] = json.loads(shown.frames)
        self.note(frames)
        return frames

    def note(self, frames: Sequence[Frame]) -> None:
        """Frames that have come, for the figures."""
        for frame in frames:
            self._told = self._told or (frame["us"], 0)
            if frame["k"] == "open":
                self._opened[frame["r"]] = frame["us"]
            elif frame["k"] == "step":
                self._count(frame)
            elif frame["k"] == "close":
                self._opened.pop(frame["r"], None)
                self._first.pop(frame["r"], None)

    def _count(self, step: Mapping[str, Any]) -> None:
        for verdict in step["out"]:
            number, now, tokens = verdict["r"], step["us"], verdict["tokens"]
            self._tokens += len(tokens)
            if number not in self._first:
                self._first[number] = now, 0
                if (opened := self._opened.pop(number, None)) is not None:
                    self._ttft_ms = (now - opened) / 1000
                continue
            carried = [row is not None for _, _, row in tokens]
            self._hits += carried if any(carried) or not verdict["hit"] else []
            began, count = self._first[number]
            self._first[number] = began, count + len(tokens)
            self._tpot_ms = (now - began) / 1000 / (count + len(tokens))

    def stats(self, status: RunStatus, now_us: int | None = None) -> Frame:
        """The figures of the run, at present or, of emulated devices, at their time."""
        stats, now_us = status.stats, time.time_ns() // 1000 if now_us is None else now_us
        before, self._told = self._told or (now_us, 0), (now_us, self._tokens)
        rate = 1e6 * (self._tokens - before[1]) / max(now_us - before[0], 1)
        return {
            "k": "stats", "run": self._run, "us": now_us, "running": len(status.running),
            "waiting": status.waiting, "kv": 0.0 if stats is None else stats.kv.used / max(stats.kv.capacity, 1),
            "tokens_per_s": round(rate, 1), "ttft_ms": self._ttft_ms, "tpot_ms": self._tpot_ms,
            "acceptance": [] if stats is None else [count / max(stats.drafts, 1) for count in stats.accepted_per_pos],
            "hit_rate": sum(self._hits) / len(self._hits) if self._hits else None, "epoch": status.epoch,
            "recovering": status.is_recovering, "recoveries": _recoveries(status),
        }  # fmt: skip


def _recoveries(status: RunStatus) -> Sequence[Frame]:
    return [
        {"epoch": one.epoch, "lost": list(one.lost), "reason": one.reason, "seconds": one.seconds} for one in status.recoveries
    ]
