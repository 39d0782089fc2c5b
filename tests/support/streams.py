"""Server-sent events as a test reads them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Any

import pytest

from support.http_server import Site

USER = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


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
