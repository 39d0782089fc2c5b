"""A resident cluster on this machine: one process per rank, and an embedded Redis unless one is given.

Once it is up, a thread watches the ranks and Redis, and replaces lost ones. All of them end with this process, however it ends.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from multiprocessing.connection import wait

from pipedec.cluster.entry import run_rank
from pipedec.cluster.host_watch import TURN_SECONDS, HostWatch, WatchedHost
from pipedec.cluster.logs import WATCH, run_log
from pipedec.cluster.place import RankPlace, RunAddress
from pipedec.cluster.processes import RankProcesses, run_apart
from pipedec.cluster.supervisor import StartProgress, Supervisor
from pipedec.config import Settings
from pipedec.config.settings import LogLevel
from pipedec.core.errors import UserError
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import EmbeddedRedis, SupervisorScheduler

_NODE = "local"  # the only host of the run
_END_SECONDS = 10.0


def resolve_apart(settings: Settings) -> PipelineSpec:
    """Resolve these settings without loading torch into this process. Raises UserError as ``engine.build.resolve``."""
    return run_apart(_resolve, settings)


def _resolve(settings: Settings) -> PipelineSpec:
    from pipedec.engine.build import resolve  # in a process that has loaded torch

    return resolve(settings)


class LocalCluster(Supervisor):
    """All ranks of a pipeline on this machine, and a Redis of its own unless the settings name one. ``run_id`` is the name of the
    run; None for a random one.
    """

    def __init__(self, spec: PipelineSpec, run_id: str | None = None) -> None:
        if spec.emulation is not None and spec.settings.passage > spec.topology.num_groups:
            raise UserError("processes that emulate slow links have no timesteps in flight on them: use --clock computed")
        self._processes = RankProcesses()
        super().__init__(spec.topology, run_id or f"local-{secrets.token_hex(4)}", self._processes)
        self.spec = spec
        self._server: EmbeddedRedis | None = None
        self._watching: _WatchThread | None = None

    def _open_redis(self) -> str:
        if (url := self.spec.settings.cluster.redis.connection_url) is not None:
            return url
        self._server, self._owns_redis = EmbeddedRedis(), True
        return self._server.url

    def _start_ranks(self) -> None:
        for rank in self.topology.ranks:
            self._start_rank(rank)

    def _start_rank(self, rank: int) -> None:
        world_size = len(self.topology.ranks)
        place = RankPlace(rank, world_size, rank, world_size, recovers=self.spec.settings.cluster.recovers)
        self._processes.start(rank, serve_rank, place, self.spec, self.address)

    def _start(self, progress: StartProgress | None) -> None:
        super()._start(progress)
        settings, scheduler = self.spec.settings.cluster, self.address.scheduler(SupervisorScheduler, self.topology)
        keep_redis = self._server.keep if self._server is not None else None
        host = WatchedHost(_NODE, self._processes, self._start_rank, keep_redis, lambda recovery: self.on_recovery(recovery))
        watch = HostWatch(scheduler, host, settings, timestep_ms=self.spec.emulation.timestep_ms if self.spec.emulation else 0.0)
        self._watching = _WatchThread(scheduler, watch, self._processes, settings.log_level)
        self._watching.start()

    def check(self) -> None:
        """Raise if the cluster has failed; lost ranks that were replaced are no failure. RankLost names the lost rank and how it
        ended, or another reason for the end of the run; SchedulerLost: Redis was away for too long.
        """
        if self._watching is None:
            super().check()
        elif self._watching.failure is not None:
            raise self._watching.failure

    def wait(self, turn: Callable[[], None] = lambda: None) -> None:
        while self._watching is not None and not self._watching.over.wait(TURN_SECONDS):
            turn()
        self.check()

    def _wait_for_ends(self) -> None:
        if self._watching is not None:
            self._watching.over.wait(_END_SECONDS)

    def _close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def kill(self) -> None:
        if self._watching is not None:
            self._watching.end()
            self._watching = None
        super().kill()


class _WatchThread(threading.Thread):
    """The thread of this machine's watch."""

    def __init__(self, scheduler: SupervisorScheduler, watch: HostWatch, processes: RankProcesses, level: LogLevel) -> None:
        super().__init__(name="pipedec watch", daemon=True)
        self.failure: Exception | None = None  # that has ended the run early
        self.over, self._ending = threading.Event(), threading.Event()  # set when the run has ended, normally or not; by ``end``
        self._scheduler, self._watch, self._processes, self._level = scheduler, watch, processes, level

    def run(self) -> None:
        try:
            with run_log(self._scheduler.run_id, WATCH, self._level, lambda: self._scheduler.epoch, own_process=False):
                while self._watch.turn() and not self._ending.is_set():
                    wait(self._processes.waitables(self._processes.alive), timeout=TURN_SECONDS)
        except Exception as error:
            self.failure = error
        finally:
            self.over.set()
        self._ending.wait()  # a Redis started by this thread ends with it

    def end(self) -> None:
        """Stop watching soon; all processes go on."""
        self._ending.set()
        self.join()
        self._scheduler.client.close()


def serve_rank(place: RankPlace, spec: PipelineSpec, address: RunAddress, report: Callable[[tuple[str, int, int]], None]) -> int:
    """Serve in a rank's process; returns its exit status. Its reports are not read once the cluster is up."""
    return run_rank(place, spec.topology, lambda: spec, address, lambda *contents: report(contents))
