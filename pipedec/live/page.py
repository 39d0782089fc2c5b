"""The pages of a server, and the feed of those who view its pipeline (docs/live.md).

All viewers share one reader. A viewer that is too slow loses frames and gets their number. Knows neither server nor connection.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pipedec.core.errors import PipedecError
from pipedec.live.reading import Frame, GoingOn

_MOST_BATCHES = 64  # batches that wait for a viewer
_LOOK_SECONDS = 0.5  # between two looks whether the server ends
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "frame-src 'self'; frame-ancestors 'self'"
)

Feed = Callable[[], AsyncIterator[list[Frame]]]  # raises PipedecError if the run ends


class Viewer:
    """One reader of the feed, and the batches that wait for it. It gets ``going_on`` first, and again when it has lost frames."""

    def __init__(self, going_on: GoingOn) -> None:
        self._going_on = going_on
        self._batches: deque[Sequence[Frame]] = deque()
        self._news = asyncio.Event()
        self._dropped = 0  # frames
        if first := going_on.frames():
            self.put(first)

    def put(self, frames: Sequence[Frame]) -> None:
        """Add a batch. If too many wait, all are dropped: rows in flight without those before them mean nothing."""
        if len(self._batches) >= _MOST_BATCHES:
            self._dropped += sum(map(len, self._batches))
            self._batches.clear()
            if known := self._going_on.frames():
                self._batches.append(known)
        self._batches.append(frames)
        self._news.set()

    async def pop_frames(self) -> tuple[list[Frame], int]:
        """Wait a moment for frames. Returns all queued frames, and the number dropped before them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._news.wait()
        self._news.clear()
        frames = [frame for batch in self._batches for frame in batch]
        dropped, self._dropped = self._dropped, 0
        self._batches.clear()
        return frames, dropped


class Hub:
    """Reads the feed of a run for as long as there are viewers; ``is_ending``: whether the server ends."""

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self._is_ending = is_ending
        self.going_on = GoingOn()
        self._viewers: set[Viewer] = set()
        self._reading: asyncio.Task[None] | None = None

    async def events(self, feed: Feed, viewer: Viewer) -> AsyncIterator[bytes]:
        """Server-sent events for one viewer, until the server or the run ends. Opens ``feed`` if nothing reads it yet."""
        self._viewers.add(viewer)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(feed))
        while not self._is_ending() and not self._reading.done():
            frames, dropped = await viewer.pop_frames()
            if dropped and frames:
                yield event([{"k": "gap", "run": frames[0]["run"], "dropped": dropped}, *frames])
            elif frames:
                yield event(frames)

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer; without viewers nothing is read."""
        self._viewers.discard(viewer)
        if not self._viewers and self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read(self, feed: Feed) -> None:
        try:
            async for frames in feed():
                for viewer in self._viewers:
                    viewer.put(frames)
                self.going_on.on_frames(frames)
        except PipedecError:
            return  # viewers connect again, and learn the reason then
        finally:
            self.going_on.clear()


def event(document: Any) -> bytes:
    """A server-sent event, in pure ASCII: some clients take further characters for ends of lines."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


@cache
def page(name: str) -> str:
    """The document in a file here: chat.html or page.html, the live page. Neither loads anything but the other one."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
