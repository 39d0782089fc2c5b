"""The HTTP side in a thread of the test, with real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import uvicorn

from pipedec.server.app import create_app
from pipedec.server.front import Front
from pipedec.server.listening import LimitedConnection
from support.processes import wait_until
from support.scripted_engine import ScriptedEngine

Result = TypeVar("Result")


@dataclass
class Site:
    """A server that listens.

    Attributes:
        client: sends requests to it.
    """

    front: Front
    port: int
    client: httpx2.Client
    loop: asyncio.AbstractEventLoop

    @property
    def engine(self) -> ScriptedEngine:
        run = self.front.served
        assert run is not None and isinstance(run.engine, ScriptedEngine)
        return run.engine

    def call(self, function: Callable[[], Any]) -> None:
        """Call it where the server calls: on the event loop."""

        async def called() -> None:
            function()

        self.run(called())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for work on the event loop of the server."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@contextmanager
def served(front: Front) -> Iterator[Site]:
    """Serve ``front`` until the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # else the kernel reads megabytes for a client
    server = uvicorn.Server(uvicorn.Config(create_app(front), http=LimitedConnection, log_config=None, lifespan="off"))
    runner = asyncio.Runner()
    loop = runner.get_loop()
    thread = threading.Thread(target=lambda: runner.run(server.serve([listener])))
    thread.start()
    port = listener.getsockname()[1]
    assert wait_until(lambda: server.started)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield Site(front, port, client, loop)
    finally:
        server.should_exit = True
        thread.join(20)
        runner.close()
        listener.close()
    assert not thread.is_alive()
