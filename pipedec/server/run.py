"""The life of one server process: it listens at once, answers 503 while the cluster loads, serves, drains, and ends.

The event loop runs in the main thread, for two reasons: signals arrive there, and a cluster that this process has started must
end when the thread that started it ends. Knows signals, uvicorn and the order of things; nothing of requests.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import uvicorn

from pipedec.client.async_client import AsyncClient
from pipedec.cluster.address import RunAddress
from pipedec.core import PipedecError
from pipedec.server.cluster_process import ClusterEnded, ClusterProcess
from pipedec.server.connection import LimitedConnection
from pipedec.server.front import Front
from pipedec.server.listening import Address
from pipedec.server.logs import log

_LOOK_SECONDS = 0.25  # between looks whether the cluster is lost
_CAUSE_SECONDS = 15.0  # for the supervisor to say why a cluster is lost
_WRITING_SECONDS = 5.0  # for answers that have ended to be written, at the end


@dataclass(frozen=True)
class ServerOptions:
    """How the process runs.

    Attributes:
        shutdown_timeout: seconds for running answers after the first signal.
        timeout_keep_alive: seconds for which an idle connection is kept open.
    """

    shutdown_timeout: float
    timeout_keep_alive: int


class Server(uvicorn.Server):
    """uvicorn's, which leaves the signals to us: it would end streams that are to be finished."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield


class Signals:
    """SIGTERM and Ctrl-C: the first one asks for an end in order, the second one for an end at once."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
