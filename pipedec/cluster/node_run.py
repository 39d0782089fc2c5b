"""A node's part in a run: which ranks it starts on which devices, their own and taken over, and the watch over them.

Also the data of the run, which nodes receive and pass on to the processes of their ranks. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from pipedec.checkpoints import CheckpointPart, check_here
from pipedec.checkpoints.download import fetch, pinned
from pipedec.cluster.entry import run_rank
from pipedec.cluster.host_watch import HostWatch, WatchedHost
from pipedec.cluster.logs import WATCH, run_log
from pipedec.cluster.place import RankPlace, RunAddress
from pipedec.cluster.processes import RankProcesses
from pipedec.cluster.spares import Spares
from pipedec.config.cluster import cluster_from_json
from pipedec.core.errors import UserError
from pipedec.plan.files import checkpoints_of, host_parts
from pipedec.plan.partition import plan
from pipedec.plan.placement import Placement, rank_places, spare_places
from pipedec.scheduler import SupervisorScheduler
from pipedec.topology import Topology

if TYPE_CHECKING:
    from pipedec.plan.spec import PipelineSpec


@dataclass(frozen=True)
class LaunchedRun:
    """The data of a run that every node has, so that each can start any rank."""

    config: str = field(repr=False)  # the cluster.yaml with one partition, as JSON
    redis_url: str = field(repr=False)
    run_id: str
    redis_host: str | None  # the host on which Redis was started; None if it runs elsewhere
    num_spares: int | None  # see ``spare_places``


def fetch_parts(run: LaunchedRun, host: str, say: Callable[..., None]) -> None:
    """Download what a host reads of the models on the hub, that of its spares included, and ``say`` how far it is. Raises as
    ``checkpoints.download.fetch``.
    """
    config = cluster_from_json(run.config)

    def show(done: int, total: int) -> None:
        say("fetching", done=done, total=total)

    if pinned(config.settings.models, show=show):  # what describes them is here from now on
        fetch(host_parts(config, spare_places(config, count=run.num_spares)).get(host, ()), show)


class NodeRun:
    """The ranks of one host. Raises UserError if this host lacks a part of the checkpoints, that of a spare included.

    Attributes:
        digests: of the tensors with which the run began, by model and name; empty until they are known.
    """

    def __init__(self, run: LaunchedRun, host: str, processes: RankProcesses, say: Callable[..., None]) -> None:
        self._run = run
        self._host = host
        self._processes = processes
        self._say = say
        config = cluster_from_json(run.config)
        self._config, self._settings = config, config.settings
        self.digests: Mapping[str, Mapping[str, str]] = {}
        self._spares = Spares(rank_places(config), spare_places(config, count=run.num_spares), run.redis_host)
        parts = [CheckpointPart(key, model) for key, model in checkpoints_of(config).items()]
        check_here(parts, "this host")  # the plan reads them
        check_here(host_parts(config, self._spares.standing_by).get(host, ()), "this host")
        self._scheduler: SupervisorScheduler | None = None
        self._log = ExitStack()
        self._placed: dict[int, Placement] = {}  # the ranks that were started here

    def start_rank(self, rank: int) -> None:
        """Start the process of a rank, for the first time or again."""
        self._placed = {other: place for other, place in self._placed.items() if other in self._processes.pids}
        others = {other: place for other, place in self._placed.items() if other != rank}
        placed = self._placed[rank] = self._spares.device_for(rank, self._host, others)
        world_size = len(self._spares.planned)
        most = world_size if len(self._spares.hosts) == 1 else world_size - 1  # ranks may yet run on other hosts
        planned = [other for other, place in enumerate(self._spares.planned) if place.host == self._host]
        if rank in planned:
            local_rank, local_world_size = planned.index(rank), min(len(planned), most)
        else:  # one rank of each host compares its checkpoints with those of rank 0
            local_rank = len(others) if rank else 0
            local_world_size = min(len(self._spares.devices(self._host)), most)
        place = RankPlace(
            rank, world_size, local_rank, local_world_size, placed.host, self._settings.cluster.recovers, digests=self.digests
        )
        self._processes.start(rank, serve_rank, self._run, place, placed)
        self._say("started", rank=rank, pid=self._processes.pids[rank])

    def watch(self, keep_redis: Callable[[], None] | None) -> HostWatch:
        """The watch over this host's ranks, from now on. ``keep_redis``: see ``WatchedHost``."""
        cut, cluster, spares = self._settings.cut, self._settings.cluster, self._spares
        topology = Topology.even(cut.stages, cut.num_groups)
        self._scheduler = scheduler = RunAddress(self._run.redis_url, self._run.run_id).scheduler(SupervisorScheduler, topology)
        self._log.enter_context(run_log(self._run.run_id, WATCH, cluster.log_level, lambda: scheduler.epoch))
        try:
            timestep_ms = plan(self._config).timestep_ms
        except UserError:  # the models are not on this host, as on a spare that is not ready
            timestep_ms = 0.0
        host = WatchedHost(
            self._host, self._processes, self.start_rank, keep_redis,
            on_recovery=lambda recovery: self._say("recovery", recovery=asdict(recovery)),
        )  # fmt: skip
        return HostWatch(scheduler, host, cluster, spares if cluster.recovers else None, timestep_ms)

    def close(self) -> None:
        """Close the connection to Redis, and the log."""
        self._log.close()
        if self._scheduler is not None:
            self._scheduler.client.close()


def serve_rank(run: LaunchedRun, place: RankPlace, placed: Placement, report: Callable[[Any], None]) -> int:
    """Serve in a rank's process, on the device ``placed`` (not always the planned one); returns its exit status."""
    config = cluster_from_json(run.config)
    cut = config.settings.cut

    def make_spec() -> PipelineSpec:
        from pipedec.engine.build import resolve_partition

        spec = resolve_partition(config)
        assert spec.places is not None
        places = [placed if rank == place.rank else planned for rank, planned in enumerate(spec.places)]
        return replace(spec, places=tuple(places))

    topology = Topology.even(cut.stages, cut.num_groups)
    return run_rank(place, topology, make_spec, RunAddress(run.redis_url, run.run_id), lambda *contents: report(contents))
