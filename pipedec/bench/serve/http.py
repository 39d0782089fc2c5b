"""Answers over HTTP: streams of server-sent events, read or dropped, and idle connections."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2

from pipedec.bench.record import Row
from pipedec.core import PipedecError

_TIMEOUT = httpx2.Timeout(600.0)
_DROPPED_AT_ONCE = 32


@dataclass(frozen=True)
class Streamed:
    """One streamed answer.

    Attributes:
        tokens: as the server counts them.
        first, last: when the first and the last piece of text arrived, in seconds of ``time.perf_counter``.
    """

    tokens: int
    text: str
    first: float
    last: float

    @property
    def tpot_seconds(self) -> float:
        """Time per output token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


async def stream(client: httpx2.AsyncClient, body: Row) -> Streamed:
    """The answer to ``body`` at ``/v1/completions``. Raises PipedecError if the server refuses it."""
    texts, times, tokens = [], [], 0
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        if response.status_code != 200:
            raise PipedecError(f"the server said {response.status_code}: {(await response.aread()).decode()[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk["choices"]:
                texts.append(chunk["choices"][0]["text"])
                times.append(time.perf_counter())
            else:
                tokens = chunk["usage"]["completion_tokens"]
    return Streamed(tokens, "".join(texts), times[0], times[-1])


async def streams(url: str, bodies: Sequence[Row]) -> tuple[list[Streamed], float]:
    """All answers at the same time, and the seconds that they took together."""
    limits = httpx2.Limits(max_connections=len(bodies))
    async with httpx2.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits) as client:
        await client.get("/health")
        began = time.perf_counter()
        answers = await asyncio.gather(*(stream(client, body) for body in bodies))
        return answers, time.perf_counter() - began


async def drop(url: str, bodies: Sequence[Row], generator: random.Random, seconds: float) -> None:
    """Ask for every answer on a connection of its own, and close it at a random moment within ``seconds``."""
    places = asyncio.Semaphore(_DROPPED_AT_ONCE)

    async def one(body: Row, patience: float) -> None:
        async with places, httpx2.AsyncClient(base_url=url, timeout=_TIMEOUT) as client:
            with suppress(TimeoutError, httpx2.TransportError):
                await asyncio.wait_for(
                    client.post("/v1/completions", json={**body, "stream": generator.random() < 0.5}), patience
                )

    await asyncio.gather(*(one(body, generator.uniform(0, seconds)) for body in bodies))


class IdleConnections:
    """Connections that have had one answer and are kept open. Use as an asynchronous context manager."""

    def __init__(self, url: str, count: int) -> None:
        self._parts = urlsplit(url)
        self._count = count
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> None:
        await asyncio.gather(*(self._open() for _ in range(self._count)))

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _open(self) -> None:
        reader, writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        self._stack.callback(writer.close)
        writer.write(b"GET /version HTTP/1.1\r\nHost: bench\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
