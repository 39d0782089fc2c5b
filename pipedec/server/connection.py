"""One HTTP connection: uvicorn's, with limits on the size of a request's head and on the time that it takes to arrive.

Bodies have their limits in the app. Without these, a head without end would fill the memory, and connections that send a byte
now and then would use up the descriptors.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class LimitedConnection(HttpToolsProtocol):
    """Answers 431 to a head of more than ``MAX_HEAD_BYTES``; closes the connection if one is not there in ``head_seconds``."""

    head_seconds = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_timer.cancel()
        super().on_headers_complete()
