"""A rank that ``pipedec launch`` has started: what its node tells it, and what it does with that.

Redis, torch and the rest are imported in the rank's own process, so that the node can name this without loading them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipedec.config import cluster_from_json
from pipedec.topology import Topology

if TYPE_CHECKING:
    from pipedec.engine.spec import PipelineSpec


@dataclass(frozen=True)
class LaunchedRank:
    """One rank of a partition.

    Attributes:
        config: the whole cluster.yaml, as JSON.
        host: of this rank, by its name in that file.
        local_rank, local_world_size: number of this rank among those of its host, and how many there are.
        groups: number of groups of stages.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    config: str = field(repr=False)
    partition: str
    groups: int
    redis_url: str = field(repr=False)
    run_id: str


def serve_rank(started: LaunchedRank, report: Callable[[Any], None]) -> int:
    """What the process of the rank runs; returns its exit status."""
    from pipedec.cluster.address import RankPlace, RunAddress
    from pipedec.cluster.entry import run_rank

    place = RankPlace(started.rank, started.world_size, started.local_rank, started.local_world_size, host=started.host)
    topology = Topology.even(started.world_size - 1, started.groups)
    address = RunAddress(started.redis_url, started.run_id)
    return run_rank(place, topology, lambda: _spec(started), address, lambda *told: report(told))


def _spec(started: LaunchedRank) -> PipelineSpec:
    from pipedec.engine.spec import PipelineSpec

    return PipelineSpec.from_config(cluster_from_json(started.config), started.partition)
