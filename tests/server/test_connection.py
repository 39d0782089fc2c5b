"""The head of a request: neither an endless one nor one that never comes holds memory or a connection."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from pipedec.server.listening import MAX_HEAD_BYTES, Address, LimitedConnection


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": b"%06d" % length})


@contextmanager
def serving(connection: type[LimitedConnection] = LimitedConnection) -> Iterator[int]:
    config = uvicorn.Config(echo, http=connection, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    with Address(port=0).listening() as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)


def read_all(client: socket.socket) -> bytes:
    received = b""
    try:
        while piece := client.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


@pytest.mark.failure_case("H10")
def test_heads_that_are_too_long_are_refused_and_others_are_not() -> None:
    with serving() as port:
        for filler in (b"GET / HTTP/1.1\r\nA: ", b"GET /", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                try:
                    client.sendall(filler)
                    for _ in range(200):
                        client.sendall(b"x" * 1024)
                except OSError:
                    pass  # it was closed in the middle of it
                assert not (answer := read_all(client)) or answer.startswith(b"HTTP/1.1 431 ")
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            large = b"A: " + b"x" * (MAX_HEAD_BYTES // 4) + b"\r\n"
            body = b"y" * (4 * MAX_HEAD_BYTES)
            for _ in range(3):  # on one connection: every head has the whole limit
                client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n" + large * 2 + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                answer = b""
                while not answer.endswith(b"%06d" % len(body)):
                    piece = client.recv(65536)
                    assert piece, answer
                    answer += piece
                assert answer.startswith(b"HTTP/1.1 200 ")


class Impatient(LimitedConnection):
    head_seconds = 0.2


@pytest.mark.failure_case("H10")
def test_a_head_that_never_ends_is_given_up() -> None:
    with serving(Impatient) as port:
        for beginning in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(beginning)
                assert (b"200 OK" in read_all(client)) == (b"\r\n\r\n" in beginning)
