"""A run that ``pipedec launch`` has started, and its ranks: the data that nodes receive, and pass on to their ranks.

Redis, torch and the rest are imported in the rank's own process, so that the node can name this without loading them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipedec.config import ClusterConfig, cluster_from_json
from pipedec.topology import Topology

if TYPE_CHECKING:
    from pipedec.plan.placement import Placement
    from pipedec.plan.spec import PipelineSpec


@dataclass(frozen=True)
class LaunchedRun:
    """The data that every node has, so that each can start any rank.

    Attributes:
        config: the cluster.yaml with one partition, as JSON.
        redis_host: the host on which Redis was started; None if it runs elsewhere.
        num_spares: as --spares.
    """

    config: str = field(repr=False)
    redis_url: str = field(repr=False)
    run_id: str
    redis_host: str | None
    num_spares: int | None


@dataclass(frozen=True)
class LaunchedRank:
    """One rank of a run.

    Attributes:
        placed: its host and device; not always the planned ones.
        digests: as of ``RankPlace``.
        local_rank, local_world_size: number of this rank among those of its host, and how many there are.
    """

    run: LaunchedRun
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    placed: Placement
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)


def serve_rank(started: LaunchedRank, report: Callable[[Any], None]) -> int:
    """Serve in the process of the rank; returns its exit status."""
    from pipedec.cluster.address import RankPlace, RunAddress
    from pipedec.cluster.entry import run_rank

    run, config = started.run, cluster_from_json(started.run.config)
    settings = config.settings
    place = RankPlace(
        started.rank, started.world_size, started.local_rank, started.local_world_size, host=started.placed.host,
        recovers=settings.cluster.recovers, digests=started.digests,
    )  # fmt: skip
    topology = Topology.even(settings.cut.stages, settings.cut.num_groups)
    address = RunAddress(run.redis_url, run.run_id)
    return run_rank(place, topology, lambda: _spec(config, started), address, lambda *told: report(told))


def _spec(config: ClusterConfig, started: LaunchedRank) -> PipelineSpec:
    from pipedec.engine.build import resolve_partition

    spec = resolve_partition(config)
    assert spec.places is not None
    places = [started.placed if rank == started.rank else planned for rank, planned in enumerate(spec.places)]
    return replace(spec, places=tuple(places))
