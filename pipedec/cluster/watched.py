"""A resident cluster whose supervisor watches all ranks itself, in a thread, and replaces lost ones: that of ``pipedec up``, and
any whose ranks another launcher starts. With an embedded Redis unless one is given.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Collection

from pipedec.cluster.entry import run_rank
from pipedec.cluster.host_watch import TURN_SECONDS, HostWatch, WatchedHost
from pipedec.cluster.logs import WATCH, run_log
from pipedec.cluster.node import own_address
from pipedec.cluster.place import RankPlace, RunAddress
from pipedec.cluster.processes import WatchedRanks
from pipedec.cluster.supervisor import StartProgress, Supervisor
from pipedec.config import RedisConfig, Settings
from pipedec.config.settings import LogLevel
from pipedec.core.errors import UserError
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import EmbeddedRedis, SupervisorScheduler
from pipedec.scheduler.redis_process import ALL_ADDRESSES, LOOPBACK
from pipedec.topology import Topology

_NODE = "local"  # to the run, all ranks are on one host
_END_SECONDS = 10.0


class WatchedCluster(Supervisor):
    """All ranks of a pipeline, wherever their processes are, and a Redis on this machine unless the settings name one."""

    def __init__(self, topology: Topology, settings: Settings, run_id: str, ranks: WatchedRanks) -> None:
        super().__init__(topology, run_id, ranks)
        self.settings = settings
        self._processes = ranks
        self._timestep_ms = 0.0  # as emulated
        self._server: EmbeddedRedis | None = None
        self._watching: _WatchThread | None = None

    @abstractmethod
    def _start_rank(self, rank: int) -> None:
        """Start the process of a rank, for the first time or again; perhaps in the thread of the watch."""

    def _find_hosts(self) -> list[str]:
        """Find a place for every rank. Returns names or addresses of other hosts that may get ranks, and must reach Redis."""
        return []

    def _open_redis(self) -> str:
        redis, others = self.settings.cluster.redis, self._find_hosts()
        if (url := redis.connection_url) is not None:
            check_reachable(redis, others)
            return url
        address = own_address(others, None) if others else None
        self._server, self._owns_redis = EmbeddedRedis(bind=ALL_ADDRESSES if address else LOOPBACK, password=redis.password), True
        return self._server.url_at(address or LOOPBACK)

    def _start_ranks(self) -> None:
        for rank in self.topology.ranks:
            self._start_rank(rank)

    def _start(self, progress: StartProgress | None) -> None:
        super()._start(progress)
        settings, scheduler = self.settings.cluster, self.address.scheduler(SupervisorScheduler, self.topology)
        keep_redis = self._server.keep if self._server is not None else None
        host = WatchedHost(_NODE, self._processes, self._start_rank, keep_redis, lambda recovery: self.on_recovery(recovery))
        watch = HostWatch(scheduler, host, settings, timestep_ms=self._timestep_ms)
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
    """The thread of the watch."""

    def __init__(self, scheduler: SupervisorScheduler, watch: HostWatch, processes: WatchedRanks, level: LogLevel) -> None:
        super().__init__(name="pipedec watch", daemon=True)
        self.failure: Exception | None = None  # that has ended the run early
        self.over, self._ending = threading.Event(), threading.Event()  # set when the run has ended, normally or not; by ``end``
        self._scheduler, self._watch, self._processes, self._level = scheduler, watch, processes, level

    def run(self) -> None:
        try:
            with run_log(self._scheduler.run_id, WATCH, self._level, lambda: self._scheduler.epoch, own_process=False):
                while self._watch.turn() and not self._ending.is_set():
                    self._processes.wait(TURN_SECONDS)
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


def check_reachable(redis: RedisConfig, others: Collection[str]) -> None:
    """Raise UserError if there are ``others``, hosts with ranks, and the URL of Redis names another server on each of them."""
    if others and redis.is_here:
        raise UserError(f"redis: {redis.url} is another server on each host: give an address that all hosts reach")


def resolve_and_serve(
    place: RankPlace, settings: Settings, address: RunAddress, report: Callable[[tuple[object, ...]], None]
) -> int:
    """Serve in a rank's process, on a host that has at least that rank's part of the models; returns the exit status."""

    def make_spec() -> PipelineSpec:
        from pipedec.engine.build import resolve

        return resolve(settings, in_parts=True)

    topology = Topology.even(settings.cut.stages, settings.cut.num_groups)
    return run_rank(place, topology, make_spec, address, lambda *contents: report(contents))
