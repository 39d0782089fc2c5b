"""The targets of faults: a cluster, the process that supervises it, and an HTTP server in front of it.

None of them is this process, so that each can be killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import psutil

from pipedec.cluster.local import LocalCluster
from pipedec.cluster.place import RunAddress
from pipedec.cluster.processes import die_with_parent
from pipedec.cluster.state import RunningCluster
from pipedec.config import AUTO
from pipedec.core.errors import PipedecError
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import ClientScheduler

START_SECONDS = 120.0
STOP_SECONDS = 30.0
_CHECK_SECONDS = 0.2
_STREAMS = 3  # that clients of the HTTP server read
_STORY = {"prompt": "Tell me a long story.", "max_tokens": 1000, "ignore_eos": True, "stream": True}


class LeavesWhenAsked(str):
    """The name of a transport. Once it arrives in a rank's process, SIGUSR1 makes that process exit with status 0."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _leave_when_asked, (str(self),)


def _leave_when_asked(transport: str) -> str:
    signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(0))
    return transport


class ClusterHost:
    """Starts a cluster in a process of its own, from the main thread, and ends with this process. Use as a context manager.

    Its processes write to ``log``. Raises PipedecError if the cluster does not start.
    """

    def __init__(self, spec: PipelineSpec, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_host, args=(spec, theirs, str(log)), name="pipedec supervisor")
        self._process.start()
        theirs.close()
        try:
            news = self._pipe.recv() if self._pipe.poll(START_SECONDS) else f"not up within {START_SECONDS:.0f} s"
        except EOFError:
            news = f"see {log}"
        if not isinstance(news, RunAddress):
            self.kill()
            raise PipedecError(f"the cluster does not start: {news}")
        self.address = news
        assert self._process.pid is not None
        self.supervisor = psutil.Process(self._process.pid)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank. Raises PipedecError if the cluster has ended."""
        try:
            self._pipe.send("pids")
            news: dict[int, int] | str = self._pipe.recv()
        except (EOFError, OSError):
            raise PipedecError("the supervisor has ended") from None
        if isinstance(news, str):
            raise PipedecError(f"the cluster has ended: {news}")
        return news

    def scheduler(self) -> ClientScheduler:
        """A connection of its own. Raises SchedulerLost, or UserError if Redis does not know the run."""
        return RunningCluster(self.address.redis_url, self.address.run_id).connect()

    def processes(self) -> list[psutil.Process]:
        """The supervisor and everything that it has started."""
        with suppress(psutil.NoSuchProcess):
            return [self.supervisor, *self.supervisor.children(recursive=True)]
        return []

    def kill(self) -> None:
        """End everything at once."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def stop(self) -> None:
        """End everything in order."""
        with suppress(OSError):
            self._pipe.send("stop")
        self._process.join(STOP_SECONDS)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop() if kind is None else self.kill()


def _host(spec: PipelineSpec, pipe: Connection, log: str) -> None:
    """The work of the supervisor's process, until it is asked to stop or the cluster fails."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    cluster = LocalCluster(spec.replaced(transport=LeavesWhenAsked(AUTO), max_restarts=1_000_000))
    try:
        cluster.start()
        pipe.send(cluster.address)
        _serve(cluster, pipe)
        cluster.stop()
    except PipedecError as error:
        print(f"the cluster has ended: {error}", flush=True)
        with suppress(OSError):
            pipe.send(str(error))
    finally:
        cluster.kill()


def _serve(cluster: LocalCluster, pipe: Connection) -> None:
    """Answer questions about the cluster. Raises PipedecError if it fails."""
    while True:
        cluster.check()
        if not pipe.poll(_CHECK_SECONDS):
            continue
        if pipe.recv() == "stop":
            return
        pipe.send(cluster.pids)


class FrontEnd:
    """``pipedec serve`` on a free port, in front of a cluster. Use as a context manager.

    Raises PipedecError if it does not start.
    """

    def __init__(self, address: RunAddress) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipedec.cli", "serve", "--run", address.run_id, "--port", "0"],
            env={**os.environ, "PIPEDEC_REDIS_URL": address.redis_url}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._readers: list[threading.Thread] = []
        self._url = self._ready_url()

    def open_streams(self) -> int:
        """Ask for streamed answers, which threads read until they end or break; returns their number."""
        self._readers = [threading.Thread(target=self._read_stream, daemon=True) for _ in range(_STREAMS)]
        for reader in self._readers:
            reader.start()
        return len(self._readers)

    def kill(self) -> None:
        """End it at once, with its connections open."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(STOP_SECONDS)

    def _read_stream(self) -> None:
        asking = httpx2.Client(base_url=self._url, timeout=START_SECONDS)
        with suppress(httpx2.HTTPError), asking, asking.stream("POST", "/v1/completions", json=_STORY) as response:
            for _ in response.iter_lines():
                continue

    def _ready_url(self) -> str:
        assert self._process.stdout is not None
        deadline = threading.Timer(START_SECONDS, self._process.kill)
        deadline.start()
        try:
            with self._process.stdout as lines:
                for event in map(json.loads, lines):
                    if event.get("event") == "ready":
                        return str(event["url"])
        finally:
            deadline.cancel()
        self._process.kill()
        raise PipedecError("pipedec serve did not start: run it with the same --redis and --run to see why")
