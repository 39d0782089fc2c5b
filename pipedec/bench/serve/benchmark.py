"""The figures of a server: one stream and many beside the Python client, CPU, memory, round trips, and dropped connections."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import structs

from pipedec.bench.options import Positive
from pipedec.bench.record import Row, header, plain
from pipedec.bench.serve.http import IdleConnections, drop, streams
from pipedec.bench.serve.server import ServerUnderTest
from pipedec.bench.sweep.pipelines import Shape
from pipedec.client.async_client import AsyncClient
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core import PipedecError, SamplingParams
from pipedec.flags import Help, check_fields
from pipedec.messages import PromptRequest

_PROMPT = "Natalia sold clips to her friends."
_ENDLESS = 1000  # tokens of answers that nobody waits for
_COUNTED_SECONDS = 4.0
_LONGEST_PATIENCE = 2.0  # seconds until a connection is dropped
_EMPTY_SECONDS = 30.0  # for what was dropped to end


@dataclass(frozen=True)
class ServeConfig:
    """What is measured. Raises UserError for a number below 1."""

    streams: Annotated[Positive, Help("Answers at the same time.")] = 64
    tokens: Annotated[Positive, Help("Tokens of an answer.")] = 64
    repeats: Annotated[Positive, Help("Times that one stream and the client take turns.")] = 5
    connections: Annotated[Positive, Help("Idle connections.")] = 500
    drops: Annotated[Positive, Help("Connections that are closed at a random moment.")] = 1000
    waiting: Annotated[Positive, Help("Requests that wait.")] = 100

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def body(self) -> Row:
        """A request over HTTP."""
        return {"prompt": _PROMPT, "max_tokens": self.tokens, "ignore_eos": True, "method": "pp", "temperature": 0}

    @property
    def request(self) -> PromptRequest:
        """The same as the client sends it."""
        return PromptRequest(_PROMPT, True, "pp", SamplingParams(max_tokens=self.tokens, ignore_eos=True))


def measure_serve(config: ServeConfig, shape: Shape, on_part: Callable[[str], None] = lambda name: None) -> Row:
    """Start the pipeline and a server in front of it, and measure.

    Args:
        on_part: told what is measured next.

    Raises:
        PipedecError: the cluster or the server does not start, an answer is lost, or something of a dropped request is left.
    """
    row = {**header("serve", plain(config)), "cluster": shape.cluster, "pair": shape.pair}
    spec = shape.spec.replaced(max_num_seqs=config.streams, max_waiting=config.drops + config.waiting)
    with LocalCluster(spec) as cluster, ServerUnderTest(cluster.address) as server:
        assert cluster.scheduler is not None
        bench = _Bench(config, cluster, server, Client(cluster.scheduler, cluster.check))
        for part in (bench.one_stream, bench.many_streams, bench.idle_connections, bench.round_trips, bench.drops):
            on_part(part.__name__.replace("_", " "))
            row[part.__name__] = part()
    return row


@dataclass(frozen=True)
class _Bench:
    config: ServeConfig
    cluster: LocalCluster
    server: ServerUnderTest
    client: Client

    def one_stream(self) -> Row:
        """Milliseconds per token, the median of answers that take turns; the first ones are not counted."""
        http, python = [], []
        for _ in range(self.config.repeats + 1):
            (answer,), _ = asyncio.run(streams(self.server.url, [self.config.body]))
            http.append(1000 * answer.tpot_seconds)
            python.append(1000 * (self.client.ask(self.config.request).metrics.tpot_seconds or 0.0))
        return _compared(statistics.median(http[1:]), statistics.median(python[1:]), "ms_per_token")

    def many_streams(self) -> Row:
        """Tokens per second, and the server's CPU time per token."""
        count = self.config.streams
        before = self.server.cpu_seconds
        answers, seconds = asyncio.run(streams(self.server.url, [self.config.body] * count))
        tokens = sum(answer.tokens for answer in answers)
        cpu_ms = 1000 * (self.server.cpu_seconds - before) / tokens
        began = time.perf_counter()
        said = [len(reply.completed().token_ids) for reply in self.client.ask_all([self.config.request] * count)]
        python = sum(said) / (time.perf_counter() - began)
        return {**_compared(tokens / seconds, python, "tokens_per_second"), "server_cpu_ms_per_token": cpu_ms}

    def idle_connections(self) -> Row:
        """Kilobytes of the server per idle connection."""
        return {"kilobytes": asyncio.run(self._idle_kilobytes())}

    def round_trips(self) -> Row:
        """Round trips to Redis per second of one front-end whose requests wait while those of others run."""
        return {"per_second": asyncio.run(self._round_trips())}

    def drops(self) -> Row:
        """What is left of dropped connections, and whether an answer is what it was.

        Raises:
            PipedecError: something is left.
        """
        config = self.config
        expected = self.client.ask(config.request).token_ids
        bodies = [{**config.body, "max_tokens": _ENDLESS}] * config.drops
        asyncio.run(drop(self.server.url, bodies, random.Random(0), _LONGEST_PATIENCE))
        ended = self._wait_until_empty()
        return {"seconds_until_empty": ended, "same_answer": self.client.ask(config.request).token_ids == expected}

    async def _idle_kilobytes(self) -> float:
        async with IdleConnections(self.server.url, 10):  # what the first ones cost once
            before = self.server.memory_bytes
            async with IdleConnections(self.server.url, self.config.connections):
                return (self.server.memory_bytes - before) / self.config.connections / 1000

    async def _round_trips(self) -> float:
        endless = structs.replace(self.config.request, sampling=SamplingParams(max_tokens=_ENDLESS, ignore_eos=True))
        address = self.cluster.address
        running, waiting = [await AsyncClient.connect(address.redis_url, address.run_id) for _ in range(2)]
        try:
            for _ in range(self.config.streams):
                await running.submit(endless)
            for _ in range(self.config.waiting):
                await waiting.submit(structs.replace(endless, priority=1))
            await asyncio.sleep(0.5)
            before, began = waiting.scheduler.round_trips, time.perf_counter()
            await asyncio.sleep(_COUNTED_SECONDS)
            return (waiting.scheduler.round_trips - before) / (time.perf_counter() - began)
        finally:
            await waiting.aclose()
            await running.aclose()

    def _wait_until_empty(self) -> float:
        """Seconds until no request runs or waits and no KV memory is used, but for prefixes."""
        assert self.cluster.scheduler is not None
        began = time.perf_counter()
        while time.perf_counter() < began + _EMPTY_SECONDS:
            status = self.cluster.scheduler.status()
            if not status.running and not status.waiting and (status.stats is None or status.stats.kv.used == 0):
                return time.perf_counter() - began
            time.sleep(0.05)
        raise PipedecError(f"{_EMPTY_SECONDS:.0f} s after the last connection was dropped: {status}")


def _compared(http: float, python: float, unit: str) -> dict[str, Any]:
    return {f"http_{unit}": http, f"python_{unit}": python, "ratio": http / python}
