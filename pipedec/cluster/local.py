"""A resident cluster on this machine: an embedded Redis and one process per rank, started and ended together.

Owns the ranks of one run, notices their deaths, and removes the files of the run. Ranks and Redis end with this process,
however it ends.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType

from pipedec.cluster.lease import claim_run
from pipedec.cluster.processes import RankProcesses, describe_exit
from pipedec.cluster.rank import RankPlace, RunAddress, run_rank
from pipedec.core import PipedecError, RankLost, SchedulerLost
from pipedec.engine.spec import PipelineSpec
from pipedec.scheduler import EmbeddedServer, RedisScheduler
from pipedec.topology import rank_name

_REPORT_SECONDS = 0.05

LoadProgress = Callable[[int, int, int], None]  # rank, tensors read, tensors in all


class LocalCluster:
    """All ranks of a pipeline on this machine. Use as a context manager, or ``start`` and ``stop``.

    Args:
        redis_url: an existing server; None starts one that belongs to this cluster.
        run_id: name of the run; None for a random one.
        transport: ``gloo``, ``nccl``, or ``auto``.
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
        self._processes = RankProcesses()
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
        return self._processes.pids

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
        world_size = self.spec.num_stages + 1
        for rank in range(world_size):
            place = RankPlace(rank, world_size, rank, world_size, meeting_place, self._transport)
            self._processes.start(rank, _serve_rank, place, self.spec, self.address)
        self._wait_until_ready(progress)
        self._is_up = True

    def _wait_until_ready(self, progress: LoadProgress | None) -> None:
        """Pass on how far the ranks have loaded, until rank 0 reports that all of them have."""
        while True:
            self.check()
            for rank, report in self._processes.read(_REPORT_SECONDS):
                match report:
                    case "ready", _, _:
                        return
                    case "loading", done, total if progress is not None:
                        progress(rank, done, total)

    def check(self) -> None:
        """Raise if a rank has ended although the run was not stopped.

        Raises:
            RankLost: names the rank and how it ended. The run has been aborted, so the other ranks end, too.
            SchedulerLost: Redis died, and the ranks with it.
        """
        ended = self._processes.exit_statuses
        if not ended or self.scheduler is None:
            return
        state = self.scheduler.status().state
        is_stopped = state == "stopping" or (self._is_up and state == "gone")
        lost = {rank: status for rank, status in ended.items() if status != 0 or not is_stopped}
        if not lost:
            return
        # A rank that fails reports why. One that was killed cannot; the other ranks then only report that they lost it.
        killed = [rank for rank, status in lost.items() if status <= 0]
        rank = killed[0] if killed else next(iter(lost))
        message = f"{rank_name(rank)} {describe_exit(lost[rank])}"
        failure = self.scheduler.failure()
        if failure is None:
            with suppress(PipedecError):
                self.scheduler.abort(rank, describe_exit(lost[rank]))
        raise RankLost(message if killed or failure is None else failure)

    def wait(self) -> None:
        """Block until the run is stopped.

        Raises:
            RankLost, SchedulerLost: a rank or Redis died.
        """
        while not self._processes.wait_for_end(60.0):
            continue
        self.check()
        self._processes.join()
        self.check()

    def stop(self) -> None:
        """Stop in order: cancel the running request, wait for the ranks to end, delete the run's keys, stop Redis."""
        try:
            if self.scheduler is not None and self.pids:
                with suppress(PipedecError):  # without Redis the ranks end by themselves
                    self.scheduler.stop()
                    if (running := self.scheduler.status().running) is not None:
                        self.scheduler.cancel(running)
                self._processes.join()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the ranks, stop Redis, and remove the run's keys and files."""
        self._processes.kill()
        self._is_up = False
        scheduler, self.scheduler = self.scheduler, None
        if scheduler is not None:
            if self._server is None:  # an embedded Redis loses its keys when it stops
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

    def _meeting_place(self) -> str:
        """URL of the file through which the ranks meet: on Linux a file without a name, which disappears with this process."""
        if sys.platform == "linux":
            file = self._files.enter_context(tempfile.TemporaryFile(prefix="pipedec-"))  # noqa: SIM115 - kill closes it
            return f"file:///proc/{os.getpid()}/fd/{file.fileno()}"
        return f"file://{self._files.enter_context(tempfile.TemporaryDirectory(prefix='pipedec-'))}/rendezvous"


def _serve_rank(place: RankPlace, spec: PipelineSpec, address: RunAddress, report: Callable[[tuple[str, int, int]], None]) -> int:
    """What a rank's process runs; returns its exit status. Nobody reads its reports once the cluster is up."""
    return run_rank(place, spec, address, lambda what, done, total: report((what, done, total)))
