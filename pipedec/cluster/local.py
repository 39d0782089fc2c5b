"""A resident cluster on this machine: an embedded Redis and one process per rank, started together and gone together.

Owns the processes, their deaths and the files of the run. Ranks are forked from a server process that has imported torch
once (``forkserver``), so that fifteen of them start in seconds; they and Redis die with this process, whatever ends it.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any

from pipedec.cluster.lease import claim_run
from pipedec.cluster.processes import begin_rank_process, rank_context
from pipedec.cluster.rank import RankPlace, RunAddress, run_rank
from pipedec.core import PipedecError, RankLost, SchedulerLost
from pipedec.engine.spec import PipelineSpec
from pipedec.scheduler import EmbeddedServer, RedisScheduler
from pipedec.topology import rank_name

STOP_SECONDS = 10.0

LoadProgress = Callable[[int, int, int], None]  # rank, tensors read, tensors in all


@dataclass
class RankProcess:
    """One rank's process and the pipe on which it reports how far it is."""

    process: ForkServerProcess
    reports: Connection
    ready: bool = False


class LocalCluster:
    """All ranks of a pipeline on this machine. Use as a context manager, or ``start`` and ``stop``.

    Args:
        redis_url: an existing server; None starts one that belongs to this cluster.
        run_id: name of the run; None draws one.
    """

    def __init__(
        self, spec: PipelineSpec, redis_url: str | None = None, run_id: str | None = None, transport: str = "auto"
    ) -> None:
        self.spec = spec
        self.run_id = run_id or f"local-{secrets.token_hex(4)}"
        self._given_url = redis_url
        self._transport = transport
        self._server: EmbeddedServer | None = None
        self._files = ExitStack()
        self._is_up = False
        self._ranks: dict[int, RankProcess] = {}
        self.scheduler: RedisScheduler | None = None

    @property
    def address(self) -> RunAddress:
        url = self._given_url or (self._server.url if self._server else None)
        if url is None:
            raise RuntimeError("the cluster has not been started")
        return RunAddress(url, self.run_id)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: entry.process.pid for rank, entry in self._ranks.items() if entry.process.pid is not None}

    def start(self, progress: LoadProgress | None = None) -> None:
        """Start everything and return when the cluster takes requests.

        Raises:
            PipedecError: a rank could not start; everything has been stopped again.
        """
        try:
            self._start(progress)
        except BaseException:
            self.kill()
            raise

    def _start(self, progress: LoadProgress | None) -> None:
        if self._given_url is None:
            self._server = EmbeddedServer()
        scheduler = self.address.scheduler(self.spec)
        claim_run(scheduler)
        self.scheduler = scheduler  # from here on the run's keys are ours to delete
        meeting_place = self._meeting_place()
        context = rank_context()
        world_size = self.spec.num_stages + 1
        for rank in range(world_size):
            place = RankPlace(rank, world_size, rank, world_size, meeting_place, self._transport)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_process, args=(place, self.spec.description(), self.address, sender), name=f"pipedec rank {rank}"
            )
            process.start()
            sender.close()
            self._ranks[rank] = RankProcess(process, receiver)
        while not self._ranks[0].ready:
            self.check()
            self._read_reports(0.05, progress)
        self._is_up = True

    def check(self) -> None:
        """Notice a rank that has ended without having been told to.

        Raises:
            RankLost: names the rank and what ended it. The other ranks have been told to end.
            SchedulerLost: Redis died, and the ranks with it.
        """
        ended = {rank: status for rank, entry in self._ranks.items() if (status := entry.process.exitcode) is not None}
        if not ended or self.scheduler is None:
            return
        state = self.scheduler.status().state
        was_told = state == "stopping" or (self._is_up and state == "gone")
        lost = {rank: status for rank, status in ended.items() if status != 0 or not was_told}
        if not lost:
            return
        # A rank that gives up says why. One that was killed cannot; the others then only say that they lost it.
        silent = [rank for rank, status in lost.items() if status <= 0]
        rank = silent[0] if silent else next(iter(lost))
        message = f"{rank_name(rank)} {_ending(lost[rank])}"
        failure = self.scheduler.failure()
        if failure is None:
            self._tell(rank, _ending(lost[rank]))
        raise RankLost(message if silent or failure is None else failure)

    def wait(self) -> None:
        """Block until somebody stops the run.

        Raises:
            RankLost, SchedulerLost: a rank or Redis died instead.
        """
        while not wait([entry.process.sentinel for entry in self._ranks.values()], timeout=60.0):
            continue
        self.check()
        self._join(STOP_SECONDS)
        self.check()

    def stop(self) -> None:
        """End in order: the request under way is cancelled, the ranks end, their keys are deleted, Redis stops."""
        try:
            if self.scheduler is not None and self._ranks:
                with suppress(PipedecError):  # then the ranks end by themselves
                    self.scheduler.stop()
                    if (running := self.scheduler.status().running) is not None:
                        self.scheduler.cancel(running)
                self._join(STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End at once whatever still runs, and leave nothing behind."""
        for entry in self._ranks.values():
            if entry.process.exitcode is None:
                entry.process.kill()
        self._join(STOP_SECONDS)
        for entry in self._ranks.values():
            entry.reports.close()
        self._ranks.clear()
        self._is_up = False
        scheduler, self.scheduler = self.scheduler, None
        if scheduler is not None:
            if self._server is None:  # keys in a Redis of our own go with it
                with suppress(SchedulerLost):
                    scheduler.clear()
            scheduler.client.close()
        if self._server is not None:
            self._server.stop()
            self._server = None
        self._files.close()

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop() if kind is None else self.kill()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for entry in self._ranks.values():
            entry.process.join(max(0.0, deadline - time.monotonic()))

    def _read_reports(self, seconds: float, progress: LoadProgress | None) -> None:
        by_pipe = {entry.reports: (rank, entry) for rank, entry in self._ranks.items()}
        for pipe in wait(list(by_pipe), timeout=seconds):
            rank, entry = by_pipe[pipe]  # type: ignore[index]
            try:
                what, done, total = entry.reports.recv()
            except EOFError:
                time.sleep(seconds)  # its process is about to be seen dead
                continue
            entry.ready = entry.ready or what == "ready"
            if progress is not None and what == "loading":
                progress(rank, done, total)

    def _tell(self, rank: int, message: str) -> None:
        with suppress(PipedecError):
            if self.scheduler is not None:
                self.scheduler.abort(rank, message)

    def _meeting_place(self) -> str:
        """Where the ranks meet: on Linux a file without a name, which is gone with this process whatever ends it."""
        if sys.platform == "linux":
            file = self._files.enter_context(tempfile.TemporaryFile(prefix="pipedec-"))  # noqa: SIM115 - kill closes it
            return f"file:///proc/{os.getpid()}/fd/{file.fileno()}"
        return f"file://{self._files.enter_context(tempfile.TemporaryDirectory(prefix='pipedec-'))}/rendezvous"


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return "ended before it was told to" if status == 0 else f"failed with exit status {status}"


def _rank_process(place: RankPlace, description: dict[str, Any], address: RunAddress, reports: Connection) -> None:
    """What a rank's process runs. Its reports say how far loading is; nobody reads them once the cluster is up."""
    begin_rank_process()

    def report(what: str, done: int, total: int) -> None:
        with suppress(OSError):
            reports.send((what, done, total))

    status = run_rank(place, PipelineSpec.from_description(description), address, report)
    sys.stderr.flush()
    os._exit(status)  # a process group that lost a peer can hang in its own clean-up
