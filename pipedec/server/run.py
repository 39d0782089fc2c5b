"""The life of one server process: it listens at once, answers 503 while the cluster loads, serves, drains, and ends.

The event loop runs in the main thread, for two reasons: signals arrive there, and a cluster that this process has started must
end when the thread that started it ends. Knows signals, uvicorn and the order of things; nothing of requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvicorn
from fastapi import FastAPI
from msgspec import Meta

from pipedec.client.async_client import AsyncClient
from pipedec.cluster.place import RunAddress
from pipedec.config import Settings
from pipedec.core.errors import PipedecError, SchedulerLost, UserError
from pipedec.families import context_length
from pipedec.flags import Help
from pipedec.server.defaults import SamplingDefaults
from pipedec.server.front import Front, ServedRun
from pipedec.server.listening import Address, LimitedConnection, accept, most_connections
from pipedec.server.logs import log
from pipedec.server.metrics import ServerMetrics
from pipedec.server.prompts import READERS
from pipedec.text.prompt import load_tokenizer

_LOOK_SECONDS = 0.1
_CAUSE_SECONDS = 15.0  # for the supervisor to find out why the cluster is lost
_WRITING_SECONDS = 5.0  # for answers that have ended to be written, at the end
_STOP_SECONDS = 20.0  # for our own cluster to end in order
_HURRY_SECONDS = 2.0
_ANNOUNCEMENT_BYTES = 1 << 16


class ClusterEnded(Exception):
    """The cluster has ended, and has printed the reason on standard error.

    ``status`` is the exit status of its process, 0 if it was asked to stop; 128 + N if signal N ended it, as in a shell. Ctrl-C
    may do so in the moment in which the process is started, before it has left the terminal's process group.
    """

    def __init__(self, returncode: int) -> None:
        self.status = returncode if returncode >= 0 else 128 - returncode
        super().__init__(f"the cluster has ended with status {self.status}")


class ClusterProcess:
    """The cluster that the server starts for itself: ``pipedec up`` in a child process, which has torch; the server has not.

    The child runs in a session of its own, so that Ctrl-C does not take the cluster from answers that are still being finished.
    It ends with the *thread* that started it, however that ends: start it from the main thread, which runs the event loop.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> RunAddress:
        """Start it; return when the cluster takes requests. Raises ClusterEnded if it ends instead."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pipedec.cli", "up", "--for-parent",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, limit=_ANNOUNCEMENT_BYTES,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(self._settings))
        self._process.stdin.close()
        async for line in self._process.stdout:
            news = json.loads(line)
            if "run_id" in news:
                return RunAddress(news["redis_url"], news["run_id"])
        raise ClusterEnded(await self._process.wait())

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def raise_cause(self) -> None:
        """Wait for the supervisor, which prints why the cluster has ended. Raises ClusterEnded unless the end was asked for."""
        assert self._process is not None
        try:
            status = await asyncio.wait_for(self._process.wait(), _CAUSE_SECONDS)
        except TimeoutError:
            raise SchedulerLost("the cluster is lost, and its supervisor does not say why") from None
        if status != 0:
            raise ClusterEnded(status)

    async def stop(self, hurry: asyncio.Event) -> None:
        """End the cluster in order, or by force after ``_STOP_SECONDS`` or soon after ``hurry`` is set. May be called twice."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        in_order, in_hurry = asyncio.ensure_future(process.wait()), asyncio.ensure_future(hurry.wait())
        await _first(in_order, in_hurry, seconds=_STOP_SECONDS)
        in_hurry.cancel()
        await asyncio.wait([in_order], timeout=_HURRY_SECONDS)
        if not in_order.done():
            with suppress(ProcessLookupError):
                process.kill()
        await in_order


@dataclass(frozen=True)
class RunOptions(Address):
    tokenizer: Annotated[Path | None, Help("Directory of the tokenizer (default: the target's).", "DIR")] = None
    shutdown_timeout: Annotated[
        float, Meta(ge=0), Help("Time for running answers to finish when the server is stopped.", "SECONDS")
    ] = 60.0
    timeout_keep_alive: Annotated[int, Meta(ge=0), Help("How long idle connections are kept open.", "SECONDS")] = 75


class _Server(uvicorn.Server):
    """uvicorn's, which leaves the signals to us: it would cut streams that are to be finished. It accepts connections as far as
    there are descriptors for them; others wait in the kernel.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])

        def protocol() -> LimitedConnection:
            return LimitedConnection(self.config, self.server_state, self.lifespan.state)

        self._accepting = [
            asyncio.create_task(accept(listener, protocol, self.config.ssl, most_connections())) for listener in sockets or ()
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)


class ServerProcess:
    """An app, the socket on which it listens, and its cluster: one to start, or the address of one that runs.

    ``on_ready`` is called when requests are taken.
    """

    def __init__(
        self, app: FastAPI, front: Front, metrics: ServerMetrics, listener: socket.socket,
        cluster: ClusterProcess | RunAddress, options: RunOptions, defaults: SamplingDefaults, on_ready: Callable[[], None],
    ) -> None:  # fmt: skip
        self._front, self._metrics, self._listener = front, metrics, listener
        self._own = cluster if isinstance(cluster, ClusterProcess) else None
        self._cluster, self._options, self._defaults, self._on_ready = cluster, options, defaults, on_ready
        self._server = _Server(
            uvicorn.Config(
                app, http=LimitedConnection, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
                timeout_keep_alive=options.timeout_keep_alive, timeout_graceful_shutdown=int(_WRITING_SECONDS),
                ssl_keyfile=options.ssl_keyfile, ssl_certfile=options.ssl_certfile,
            )
        )  # fmt: skip
        self._client: AsyncClient | None = None

    async def run(self) -> None:
        """Serve until a signal arrives or the cluster ends.

        Raises ClusterEnded if our own cluster has failed, or could not start; PipedecError if the cluster is lost, or a second
        signal has cut answers.
        """
        first_signal, second_signal = asyncio.Event(), asyncio.Event()  # asks for an end in order; for an end at once

        def arrived() -> None:
            (second_signal if first_signal.is_set() else first_signal).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, arrived)
        http = asyncio.create_task(self._server.serve([self._listener]))
        life = asyncio.create_task(self._live())
        try:
            await _first(life, http, asyncio.create_task(first_signal.wait()))
            if life.done():
                life.result()
            else:
                await self._drain(life, second_signal)
        finally:
            life.cancel()
            await asyncio.wait([life])
            await self._close(http, second_signal)

    async def _live(self) -> None:
        """From the start of the cluster to its end. Raises as ``run``."""
        address = self._cluster if isinstance(self._cluster, RunAddress) else await self._cluster.start()
        client = self._client = await AsyncClient.connect(address.redis_url, address.run_id)
        description = client.description
        directory = self._options.tokenizer or Path(description.target)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, directory)
        except UserError as error:
            raise UserError(f"{error}: give --tokenizer DIR, a directory with the target's tokenizer") from None
        context = context_length(directory, description.settings.limits.max_model_len)
        self._front.attach(ServedRun(client, tokenizer, description, context, self._defaults))
        self._metrics.attach(client.status, client.present_description)
        self._on_ready()
        while client.failure is None and not (self._own is not None and self._own.has_ended):
            await asyncio.sleep(_LOOK_SECONDS)
        reason = str(client.failure or "it has ended")
        log("lost", logging.WARNING, reason=reason)
        self._front.lose(reason)
        if self._own is not None:
            await self._own.raise_cause()
        elif client.failure is not None:
            raise client.failure

    async def _drain(self, life: asyncio.Task[None], second_signal: asyncio.Event) -> None:
        """Let running answers finish; end those that take too long, or all at the second signal."""
        log("draining", unfinished=self._front.unfinished)
        self._front.drain()
        READERS.give_up()
        await self._end_checks()
        finished = asyncio.create_task(self._until_finished())
        second = asyncio.create_task(second_signal.wait())
        await _first(finished, second, life, seconds=self._options.shutdown_timeout)
        if life.done():
            life.result()
        unfinished = self._front.unfinished
        self._front.abort()
        if second.done() and unfinished:
            raise PipedecError(f"ended at once by a second signal: {unfinished} answers were cut")
        await _first(asyncio.create_task(self._until_finished()), second, seconds=_WRITING_SECONDS)

    async def _end_checks(self) -> None:
        if self._front.served is not None:
            await self._front.served.structures.aclose()

    async def _until_finished(self) -> None:
        while self._front.unfinished:
            await asyncio.sleep(_LOOK_SECONDS)

    async def _close(self, http: asyncio.Task[None], hurry: asyncio.Event) -> None:
        """End the server, then the connection to the cluster, then the cluster if it is ours: by force in a hurry."""
        self._server.should_exit = True
        await self._end_checks()
        if self._client is None:  # a cluster that has not taken requests has nothing to finish
            hurry.set()
        try:
            await http
        finally:
            if self._client is not None:
                with suppress(PipedecError):
                    await self._client.aclose()
            if self._own is not None:
                await self._own.stop(hurry)


async def _first(*tasks: asyncio.Future[Any], seconds: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
