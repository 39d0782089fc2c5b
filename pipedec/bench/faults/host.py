"""A cluster under test and the process that supervises it, which is not this one: so that it can be killed, too."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from pipedec.cluster.address import RunAddress
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.processes import die_with_parent
from pipedec.cluster.state import RunningCluster
from pipedec.config import AUTO
from pipedec.core import PipedecError
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import ClientScheduler

START_SECONDS = 120.0
STOP_SECONDS = 30.0
_CHECK_SECONDS = 0.2


class LeavesWhenAsked(str):
    """The name of a transport. Once it arrives in a rank's process, SIGUSR1 makes that process exit with status 0."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _leave_when_asked, (str(self),)


def _leave_when_asked(transport: str) -> str:
    signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(0))
    return transport


class ClusterHost:
    """Starts a cluster in a process of its own, from the main thread, and ends with this process. Use as a context manager.

    Args:
        log: a file for what its processes write.

    Attributes:
        address: of its run.
        supervisor: the process.

    Raises:
        PipedecError: the cluster does not start.
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
    """What the supervisor's process does until it is told to stop, or the cluster fails."""
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
