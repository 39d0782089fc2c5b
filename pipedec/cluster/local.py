"""A resident cluster on this machine: an embedded Redis and one process per rank, started and ended together.

Once it is up, a thread watches the ranks and Redis, and replaces lost ones. All of them end with this process, however it ends.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress

from pipedec.cluster.address import RankPlace, RunAddress
from pipedec.cluster.entry import run_rank
from pipedec.cluster.host_watch import HostWatch
from pipedec.cluster.logs import WATCH, run_log
from pipedec.cluster.processes import RankProcesses, run_apart
from pipedec.cluster.supervisor import TURN_SECONDS, StartProgress, Supervisor
from pipedec.config import LogLevel, Settings
from pipedec.core import SchedulerLost, UserError
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import EmbeddedServer, SupervisorScheduler

_NODE = "local"  # the only host of the run
_END_SECONDS = 10.0


def resolve_apart(settings: Settings) -> PipelineSpec:
    """Resolve these settings without loading torch into this process. Raises UserError as ``engine.build.resolve``."""
    return run_apart(_resolve, settings)


def _resolve(settings: Settings) -> PipelineSpec:
    from pipedec.engine.build import resolve  # in a process that has loaded torch

    return resolve(settings)


class LocalCluster(Supervisor):
    """All ranks of a pipeline on this machine. Use as a context manager, or ``start`` and ``stop``.

    Starts a Redis that belongs to this cluster unless the settings name one.

    Args:
        run_id: name of the run; None for a random one.
    """

    def __init__(self, spec: PipelineSpec, run_id: str | None = None) -> None:
        self._processes = RankProcesses()
        super().__init__(spec.topology, run_id or f"local-{secrets.token_hex(4)}", self._processes)
        self.spec = spec
        self._password = secrets.token_hex(24)
        self._server: EmbeddedServer | None = None
        self._watching: _Watching | None = None

    def _open_redis(self) -> str:
        if (url := self.spec.settings.cluster.redis.connection_url) is not None:
            return url
        self._server = EmbeddedServer(password=self._password)
        return self._server.url

    @property
    def _owns_redis(self) -> bool:
        return self._server is not None

    def _start_ranks(self) -> None:
        for rank in self.topology.ranks:
            self._start_rank(rank)

    def _start_rank(self, rank: int) -> None:
        world_size = len(self.topology.ranks)
        place = RankPlace(rank, world_size, rank, world_size, recovers=self.spec.settings.cluster.recovers)
        self._processes.start(rank, serve_rank, place, self.spec, self.address)

    def _start(self, progress: StartProgress | None) -> None:
        super()._start(progress)
        scheduler = self.address.scheduler(SupervisorScheduler, self.topology)
        self._watching = _Watching(
            scheduler,
            HostWatch(
                scheduler, _NODE, self._processes, self._start_rank, self.spec.settings.cluster, self._keep_redis,
                lambda recovery: self.on_recovery(recovery),
                timestep_ms=self.spec.emulation.timestep_ms if self.spec.emulation else 0.0,
            ),
            self.spec.settings.cluster.log_level,
        )  # fmt: skip

    def _keep_redis(self) -> None:
        """Restart the embedded Redis if it has died: at the same address, and empty."""
        server = self._server
        if server is None or server.is_running:
            return
        with suppress(SchedulerLost, UserError):  # reported when it has failed for too long
            self._server = EmbeddedServer(port=server.port, password=self._password)

    def check(self) -> None:
        """Raise if the cluster has failed. Lost ranks that were replaced are not a failure.

        Raises:
            RankLost: names the rank that was lost, and how, or gives another reason for the end of the run.
            SchedulerLost: Redis was away for too long.
        """
        if self._watching is None:
            super().check()
        elif (failure := self._watching.failure) is not None:
            raise failure

    def wait(self, turn: Callable[[], None] = lambda: None) -> None:
        while self._watching is not None and not self._watching.wait(TURN_SECONDS):
            turn()
        self.check()

    def _join_ranks(self) -> None:
        if self._watching is not None:
            self._watching.wait(_END_SECONDS)

    def _close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def kill(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.end()
        super().kill()


class _Watching:
    """A thread in which a host's watch runs.

    Attributes:
        failure: the error that has ended it early.
    """

    def __init__(self, scheduler: SupervisorScheduler, watch: HostWatch, level: LogLevel) -> None:
        self.failure: Exception | None = None
        self._level: LogLevel = level
        self._scheduler = scheduler
        self._watch = watch
        self._over, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipedec watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with run_log(self._scheduler.run_id, WATCH, self._level, lambda: self._scheduler.epoch, own_process=False):
                self._watch.run()
        except Exception as error:
            self.failure = error
        finally:
            self._over.set()
        self._ending.wait()  # a Redis started by this thread ends with it

    def wait(self, seconds: float) -> bool:
        """Wait until the run has ended, normally or not. Returns whether it has."""
        return self._over.wait(seconds)

    def end(self) -> None:
        """Stop watching."""
        self._watch.end()
        self._ending.set()
        self._thread.join()
        self._scheduler.client.close()


def serve_rank(place: RankPlace, spec: PipelineSpec, address: RunAddress, report: Callable[[tuple[str, int, int]], None]) -> int:
    """Serve in a rank's process; returns its exit status. Its reports are not read once the cluster is up."""
    return run_rank(place, spec.topology, lambda: spec, address, lambda *told: report(told))
