"""Feeds for the live page without a cluster: the shipped recording, a feed of any length, and a server that sends them."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pipedec

Frame = dict[str, Any]
ROOT = Path(pipedec.__file__).parent.parent
PAGES = Path(pipedec.__file__).parent / "live"
RECORDING = ROOT / "docs" / "live" / "paper-14.jsonl.gz"
TIMESTEP_US = 22_000


def recording() -> list[Frame]:
    """What the methods did side by side."""
    return [json.loads(line) for line in gzip.decompress(RECORDING.read_bytes()).splitlines()]


def long_feed(timesteps: int, stages: int = 14) -> Iterator[Frame]:
    """One answer without an end: three guesses enter below the last row at every timestep, and the first one is always right."""
    yield {"k": "run", "v": 1, "run": "long", "epoch": 0, "stages": stages, "groups": stages, "target": "t", "draft": "d",
           "method": None, "emulated": None, "us": 0}  # fmt: skip
    opened = {"r": 0, "method": "pipedec", "prompt": "count", "prompt_tokens": 1, "cached": 0, "said": ""}
    yield {"k": "open", "run": "long", "t": 0, "us": 0, **opened}
    for t in range(1, timesteps + 1):
        first = 3 * (t - 1)
        parent = first - 3 if t > 1 else -1
        rows = [[first + place, parent, place, f"{t}.{place} ", 0.9 - 0.4 * place] for place in range(3 if t > 1 else 1)]
        out = []
        if t > stages:
            known = 3 * (t - stages)
            guesses = [known + 1, known + 2]
            verdict = {"tokens": [[0, f"{t} ", known]], "text": f"{t} ", "hit": True, "late": 0, "pruned": guesses, "end": None}
            out.append({"r": 0, **verdict})
        entered = {"r": 0, "chunk": 0, "rows": rows}
        yield {"k": "step", "run": "long", "t": t, "us": t * TIMESTEP_US, "ms": 22.0, "in": [entered], "out": out}


def eventful_feed() -> list[Frame]:
    """Two requests on two stages: a hit, a miss, a row that comes late, a gap and another epoch."""
    us = iter(range(0, 10**9, TIMESTEP_US))

    def frame(kind: str, **values: Any) -> Frame:
        return {"k": kind, "run": "two", "us": next(us), **values}

    def step(t: int, entered: list[Frame], out: list[Frame]) -> Frame:
        return frame("step", t=t, ms=22.0, **{"in": entered, "out": out})

    def verdict(r: int, tokens: list[list[Any]], text: str, hit: bool, late: int = 0, pruned: tuple[int, ...] = ()) -> Frame:
        return {"r": r, "tokens": tokens, "text": text, "hit": hit, "late": late, "pruned": list(pruned), "end": None}

    def opened(r: int, said: str) -> Frame:
        about = {"method": "pipedec-bestfirst", "prompt": f"prompt {r}", "prompt_tokens": 3, "cached": 0}
        return frame("open", t=0, r=r, said=said, **about)

    about = {"v": 1, "stages": 2, "groups": 2, "target": "t", "draft": "d", "method": None, "emulated": None}
    rows = [[0, -1, 1, "1", 1.0], [1, 0, 2, "2", 0.6], [2, 0, 3, "3", 0.3]]
    return [
        frame("run", epoch=0, **about),
        opened(0, ""),
        opened(1, ""),
        step(1, [{"r": 0, "chunk": 3, "rows": []}, {"r": 1, "chunk": 3, "rows": []}], []),
        step(2, [], [verdict(0, [[9, "A", None]], "A", False), verdict(1, [[8, "B", None]], "B", False)]),
        step(3, [{"r": 0, "chunk": 0, "rows": rows}], [verdict(0, [[1, "1", None]], "1", False)]),
        step(4, [{"r": 0, "chunk": 0, "rows": []}], [verdict(0, [[7, "!", None]], "!", False, 1, (0, 1, 2))]),
        frame("gap", dropped=7),
        opened(0, "A1 and "),
        step(9, [], [verdict(0, [[5, "more", None]], "more", True)]),
        frame("run", epoch=1, **about),
        opened(0, "A1 and more"),
    ]


class FeedServer:
    """Serves the pages at ``/`` and ``/live``, and at ``/live/feed`` each connection's part of ``parts``: the stream is cut
    behind it. The last one's stays open. ``/recording.jsonl.gz`` is the shipped recording.
    """

    def __init__(self, parts: Sequence[Iterable[Frame]] = ()) -> None:
        self.connections = 0
        self._parts = [list(part) for part in parts]
        self._ends = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with suppress(OSError):  # the reader has gone
                    server.on_get(self)

            def do_POST(self) -> None:
                server.on_post(self)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Nothing is logged."""

        return Handler

    def on_get(self, request: BaseHTTPRequestHandler) -> None:
        files = {
            "/": (PAGES / "chat.html", "text/html"),
            "/live": (PAGES / "page.html", "text/html"),
            "/recording.jsonl.gz": (RECORDING, "application/gzip"),
        }
        path = request.path.partition("?")[0]
        if path in files:
            start(request, files[path][1])
            request.wfile.write(files[path][0].read_bytes())
        elif path == "/live/feed":
            start(request, "text/event-stream")
            self.send(request.wfile.write)
        else:
            request.send_error(404)

    def on_post(self, request: BaseHTTPRequestHandler) -> None:
        request.send_error(405)

    def send(self, write: Any) -> None:
        number = self.connections
        self.connections += 1
        frames = self._parts[min(number, len(self._parts) - 1)] if self._parts else []
        for begin in range(0, len(frames), 50):
            write(b"data: " + json.dumps(frames[begin : begin + 50]).encode() + b"\n\n")
        while number >= len(self._parts) - 1 and not self._ends.wait(0.2):
            write(b": ping\n\n")

    @contextmanager
    def serving(self) -> Iterator[FeedServer]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._ends.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def start(request: BaseHTTPRequestHandler, kind: str, status: int = 200) -> None:
    """Send the head of a response."""
    request.send_response(status)
    request.send_header("Content-Type", kind)
    request.end_headers()


def wait_for(page: Any, expression: str, seconds: float = 60.0) -> None:
    """Until an expression is true on a page."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, (expression, page.evaluate("pipedecLive.state()"))
        page.wait_for_timeout(50)
