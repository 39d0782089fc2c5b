"""A server for the chat page that answers questions with scripts, at the pace of the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.feeds import FeedServer, Frame, start

MODEL = "org/tiny-chat"
PROMPT_TOKENS, CACHED_TOKENS = 40, 24


@dataclass(frozen=True)
class Script:
    """An answer, or with another ``status`` than 200 a refusal.

    Attributes:
        parts: deltas of the answer, a text being one of its content; events that are waited for; errors, which end the stream.
        finish: the reason in the last chunk; None breaks the stream off.
    """

    parts: Sequence[str | dict[str, Any] | threading.Event] = ()
    finish: str | None = "stop"
    status: int = 200


def thought(text: str) -> dict[str, Any]:
    return {"reasoning_content": text}


def called(name: str, arguments: str) -> dict[str, Any]:
    """A piece of the answer's first call."""
    return {"tool_calls": [{"index": 0, "function": {"name": name, "arguments": arguments}}]}


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


class ChatServer(FeedServer):
    """The feed is ``frames``. ``key`` is asked for, if one is given.

    Attributes:
        scripts: of the next answers; the last one is also that of all later ones.
        bodies: of the questions.
        has_left: set when a reader of an answer has gone.
    """

    def __init__(self, *scripts: Script, key: str | None = None, frames: Iterable[Frame] = ()) -> None:
        super().__init__([frames])
        self.scripts = list(scripts)
        self.bodies: list[dict[str, Any]] = []
        self.has_left = threading.Event()
        self.key = key

    def on_get(self, request: BaseHTTPRequestHandler) -> None:
        if request.path != "/v1/models":
            super().on_get(request)
        elif self._allows(request):
            _send(request, 200, {"data": [{"id": MODEL, "root": "/models/tiny", "max_model_len": 2048}]})

    def on_post(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        if self._allows(request):
            self.bodies.append(body)
            self._answer(request, self.scripts[0] if len(self.scripts) == 1 else self.scripts.pop(0))

    def _allows(self, request: BaseHTTPRequestHandler) -> bool:
        allows = self.key is None or request.headers["Authorization"] == f"Bearer {self.key}"
        if not allows:
            _send(request, 401, error("give a valid API key"))
        return allows

    def _answer(self, request: BaseHTTPRequestHandler, script: Script) -> None:
        if script.status != 200:
            _send(request, script.status, script.parts[0])
            return
        start(request, "text/event-stream")
        try:
            for event in self.events(script):
                request.wfile.write(b": ping\n\n" if event is None else b"data: " + json.dumps(event).encode() + b"\n\n")
            request.wfile.write(b"data: [DONE]\n\n" if script.finish else b"")
        except OSError:
            self.has_left.set()

    def events(self, script: Script) -> Iterable[dict[str, Any] | None]:
        """The chunks of an answer; None while it waits."""
        count = 0
        for part in script.parts:
            if isinstance(part, threading.Event):
                while not part.wait(0.02) and not self._ends.is_set():
                    yield None
            elif isinstance(part, dict) and "error" in part:
                yield part
                return
            else:
                count += 1
                yield _chunk(part if isinstance(part, dict) else {"content": part}, None, count)
        if script.finish is not None:
            yield _chunk({}, script.finish, count)


def _send(request: BaseHTTPRequestHandler, status: int, document: object) -> None:
    start(request, "application/json", status)
    request.wfile.write(json.dumps(document).encode())


def _chunk(delta: dict[str, Any], reason: str | None, count: int) -> dict[str, Any]:
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], "usage": usage}
