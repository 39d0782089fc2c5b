"""The supervisor of a run: claims the run's name, waits until its ranks serve, names the rank that was lost, ends everything.

Does not know how ranks are started and where Redis runs: that is for the subclasses, ``LocalCluster`` and ``LaunchedCluster``.
Loads no torch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from pipedec.cluster.lease import claim_run
from pipedec.cluster.place import RunAddress
from pipedec.cluster.processes import LOST_ANOTHER, WatchedRanks, killed_ranks
from pipedec.core.errors import PipedecError, RankLost, SchedulerLost
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import Recovery
from pipedec.scheduler import ClientScheduler, SupervisorScheduler, read_description
from pipedec.topology import Topology, rank_name

if TYPE_CHECKING:
    from pipedec.cluster.nodes import Nodes

_REPORT_SECONDS = 0.05
_LATE_SECONDS = 3.0  # on a busy machine a killed rank is seen to end long after its neighbours

StartProgress = Callable[[int, str, int, int], None]  # rank, "loading" or "warming", units done, units in all


class Supervisor(ABC):
    """All ranks of a run. Use as a context manager, or ``start`` and ``stop``.

    Attributes:
        scheduler: for this process; None before the start and after the end.
        on_recovery: called, perhaps in another thread, with every recovery when it is over.
        outlives_supervisor: whether the cluster, once it is up, goes on if this process is killed.
    """

    outlives_supervisor = False

    def __init__(self, topology: Topology, run_id: str, ranks: WatchedRanks | Nodes) -> None:
        self.topology = topology
        self.run_id = run_id
        self.scheduler: ClientScheduler | None = None
        self.on_recovery: Callable[[Recovery], None] = lambda recovery: None
        self._ranks = ranks
        self._redis_url: str | None = None
        self._owns_redis = False  # Redis, and every key in it, ends with this cluster
        self._is_up = False

    @abstractmethod
    def _open_redis(self) -> str:
        """The URL of the run's Redis, started if necessary."""

    @abstractmethod
    def _start_ranks(self) -> None:
        """Start every rank. The run's name has been claimed."""

    @abstractmethod
    def _close(self) -> None:
        """End what ``_open_redis`` and ``_start_ranks`` have started. May be called twice."""

    @abstractmethod
    def wait(self, turn: Callable[[], None] = lambda: None) -> None:
        """Block until the run is stopped, and call ``turn`` at least once a second. Raises what that raises, and as ``check``."""

    @abstractmethod
    def _wait_for_ends(self) -> None:
        """Wait up to ten seconds until all ranks have ended, as requested."""

    @property
    def address(self) -> RunAddress:
        if self._redis_url is None:
            raise RuntimeError("the cluster has not been started")
        return RunAddress(self._redis_url, self.run_id)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank, each on the rank's host."""
        return self._ranks.pids

    def start(self, progress: StartProgress | None = None) -> None:
        """Start everything; return when the cluster takes requests. Raises PipedecError if that fails; all has been stopped."""
        try:
            self._start(progress)
        except BaseException:
            self.kill()
            raise

    def _start(self, progress: StartProgress | None) -> None:
        self._redis_url = self._open_redis()
        claiming = self.address.scheduler(SupervisorScheduler, self.topology)
        claim_run(claiming)
        self.scheduler = ClientScheduler(claiming.client, self.run_id, self.topology)  # from here on its keys are ours to delete
        self._start_ranks()
        while not self._is_up:
            self.check()
            for rank, report in self._ranks.read(_REPORT_SECONDS):
                match report:
                    case "ready", _, _:  # rank 0 reports that all of them are
                        self._is_up = True
                    case what, done, total if progress is not None:
                        progress(rank, what, done, total)

    def check(self) -> None:
        """Raise if a rank has ended although the run was not stopped; subclasses replace this check once the run is up. RankLost
        names the rank and how it ended, and the run has been aborted, so the other ranks end, too; SchedulerLost: Redis died, and
        the ranks with it.
        """
        if not self._ranks.exit_statuses or self.scheduler is None:
            return
        deadline = time.monotonic() + _LATE_SECONDS  # where all have lost another, that one is given time to be seen to end
        while set((ended := self._ranks.exit_statuses).values()) == {LOST_ANOTHER} and time.monotonic() < deadline:
            time.sleep(_REPORT_SECONDS)
        killed = killed_ranks(ended)
        try:
            run = self.scheduler.status()
        except SchedulerLost:
            if killed:  # Redis was lost with the rank
                raise RankLost(f"{rank_name(killed[0])} {self._ranks.describe_end(killed[0])}") from None
            raise
        is_stopped = run.state == "stopping" or (self._is_up and run.state == "gone")
        if not (failed := [rank for rank, status in ended.items() if status != 0 or not is_stopped]):
            return
        # A rank that fails reports why. One that was killed cannot; the other ranks then only report that they lost it.
        early = [rank for rank in failed if ended[rank] == 0]
        if run.failure is not None and not killed and not early:
            raise RankLost(self.with_hosts(run.failure))
        rank = (killed or early or failed)[0]
        end = self._ranks.describe_end(rank)
        with suppress(PipedecError):
            self.scheduler.abort(rank, end)  # so that the other ranks end
        raise RankLost(f"{rank_name(rank)} {end}")

    def with_hosts(self, message: str) -> str:
        """The message with the host of every rank that it names, where there are several hosts."""
        return message

    def description(self) -> RunDescription:
        """The description that the cluster has published for clients. Raises PipedecError if its run has been stopped."""
        if self.scheduler is None or (found := read_description(self.scheduler.client, self.run_id)) is None:
            raise PipedecError(f"the run {self.run_id!r} has been stopped")
        return found

    def stop(self) -> None:
        """Stop in order: cancel the running requests, wait for the ranks to end, delete the run's keys, stop Redis."""
        try:
            if self.scheduler is not None and self.pids:
                with suppress(PipedecError):  # without Redis the ranks end by themselves
                    self.scheduler.stop()
                    for number in self.scheduler.status().running:
                        self.scheduler.cancel(number)
                self._wait_for_ends()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the ranks, stop Redis, and remove the run's keys and files."""
        self._ranks.kill()
        self._is_up = False
        scheduler, self.scheduler = self.scheduler, None
        if scheduler is not None:
            if not self._owns_redis:  # a Redis of our own loses its keys when it stops
                with suppress(SchedulerLost):
                    scheduler.clear()
            scheduler.client.close()
        self._redis_url = None
        self._close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.stop() if kind is None else self.kill()
