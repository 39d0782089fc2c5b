"""Server-sent events: sse-starlette's response, which pings, notices that the client goes away, and waits for no slow reader."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Receive, Scope, Send

from pipedec.server.settings import ServerSettings

DONE = b"data: [DONE]\n\n"

AppStatus.disable_automatic_graceful_drain()  # a stream goes on while the server drains; ``Front.abort`` ends it


def event(document: dict[str, Any]) -> bytes:
    """One event. Pure ASCII: some clients take further characters for ends of lines."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


class EventStream(EventSourceResponse):
    """A stream of ready-made events.

    Args:
        close: called when the stream is not read any more, whether it was begun or not, and however it ends.
    """

    def __init__(self, events: AsyncIterator[bytes], settings: ServerSettings, close: Callable[[], None]) -> None:
        super().__init__(events, ping=settings.ping_seconds, send_timeout=settings.send_seconds, sep="\n")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(SendTimeoutError):  # the server closes the connection, since the response is not complete
                await super().__call__(scope, receive, send)
        finally:
            self._close()
