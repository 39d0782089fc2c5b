"""The HTTP side in a thread of the test, with real sockets, and what comes from it as a test reads it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import pytest
import uvicorn

from pipedec.client.async_client import AsyncClient
from pipedec.cluster.local import LocalCluster
from pipedec.scheduler import RunStatus
from pipedec.server.app import create_app
from pipedec.server.front import Front, ServedRun, ServerSettings
from pipedec.server.listening import LimitedConnection
from pipedec.text.tokenizer import Tokenizer
from support.processes import wait_until
from support.scripted_engine import ScriptedEngine, attach, in_bursts
from support.tiny_pair import CONTEXT, Pair

Result = TypeVar("Result")
USER = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


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


Say = Callable[[str, str], Site]


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
        if front.served is not None:
            asyncio.run_coroutine_threadsafe(front.served.structures.aclose(), loop).result(20)
        server.should_exit = True
        thread.join(20)
        runner.close()
        listener.close()
    assert not thread.is_alive()


@contextmanager
def saying(front: Front, tokenizers: Mapping[str, Tokenizer]) -> Iterator[Say]:
    """A server whose engine generates the text that a test gives, three tokens at a time, with one of ``tokenizers``, by name."""
    with served(front) as site:

        def say(name: str, text: str) -> Site:
            ids = tokenizers[name].encode(text, add_special_tokens=False)
            attach(front, tokenizers[name], lambda request: in_bursts(ids, 3))
            return site

        yield say


@contextmanager
def cluster_served(cluster: LocalCluster, pair: Pair) -> Iterator[Site]:
    """Serve a cluster with the key ``secret``, which the site's client has."""
    front = Front(ServerSettings(("tiny",), api_keys=("secret",)))
    with served(front) as site:
        site.client.headers["Authorization"] = "Bearer secret"
        client = site.run(AsyncClient.connect(cluster.address.redis_url, cluster.run_id))
        front.attach(ServedRun(client, Tokenizer(pair.target), client.description, CONTEXT))
        yield site
        site.run(client.aclose())


def status(site: Site) -> RunStatus:
    """That of the cluster behind a site."""
    return site.run(site.front.require().engine.status())


def ask(site: Site, path: str, **body: Any) -> dict[str, Any]:
    """The document of a response that succeeds."""
    response = site.client.post(path, json=filled(path, body))
    assert response.status_code == 200, response.text
    return response.json()


def stream(site: Site, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    response = site.client.post(path, json=filled(path, body | {"stream": True}))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks(response.text)


def chunks(text: str) -> list[dict[str, Any]]:
    events = [line for line in text.split("\n") if line and not line.startswith(":")]
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    return [json.loads(event[6:]) for event in events[:-1]]


def content(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


def text_of(parts: Iterable[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice."""
    return "".join(content(chunk) for chunk in parts if chunk["choices"] and chunk["choices"][0]["index"] == index)


def next_chunk(lines: Any) -> dict[str, Any]:
    """The next chunk of ``response.iter_lines()``."""
    return next(json.loads(line[6:]) for line in lines if line.startswith("data: "))


def open_stream(site: Site, path: str, **body: Any) -> Any:
    """A context manager that yields the response."""
    return site.client.stream("POST", path, json=filled(path, body | {"stream": True}))


def filled(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body of a request with a prompt, or messages."""
    return ({"messages": USER} if path == CHAT else {"prompt": "hello"}) | body


def send(site: Site, path: str, connection: socket.socket, **fields: Any) -> None:
    """Send a request, and read nothing."""
    body = json.dumps({"prompt": "hello", "messages": USER, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    key = site.client.headers.get("authorization", "none")
    connection.sendall(f"{head}authorization: {key}\r\n\r\n".encode() + body)
