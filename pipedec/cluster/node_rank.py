"""A rank that ``pipedec launch`` has started: what its node tells it, and what it does with that.

torch and the rest are imported in the rank's own process, so that the node can name this without loading them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipedec.core import PipedecError

if TYPE_CHECKING:
    from pipedec.cluster.address import RunAddress


@dataclass(frozen=True)
class LaunchedRank:
    """One rank of a partition.

    Attributes:
        config: the whole cluster.yaml, as JSON.
        host: of this rank, by its name in that file.
        local_rank, local_world_size: number of this rank among those of its host, and how many there are.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    config: str = field(repr=False)
    partition: str
    redis_url: str = field(repr=False)
    run_id: str


def serve_rank(place: LaunchedRank, report: Callable[[Any], None]) -> int:
    """What the process of the rank runs; returns its exit status."""
    from pipedec.cluster.address import RankPlace, RunAddress
    from pipedec.cluster.rank import run_rank
    from pipedec.config import cluster_from_json
    from pipedec.engine.spec import PipelineSpec

    address = RunAddress(place.redis_url, place.run_id)
    try:
        spec = PipelineSpec.from_config(cluster_from_json(place.config), place.partition)
    except PipedecError as error:
        _refuse(address, place, str(error))
        return 1
    rank_place = RankPlace(place.rank, place.world_size, place.local_rank, place.local_world_size, host=place.host)
    return run_rank(rank_place, spec, address, lambda *told: report(told))


def _refuse(address: RunAddress, place: LaunchedRank, message: str) -> None:
    """Tell the launcher and the other ranks why this one cannot start."""
    from pipedec.topology import Topology, of_rank

    with suppress(PipedecError):
        address.scheduler(Topology.even(place.world_size - 1, 1)).abort(place.rank, message)
    print(f"pipedec: {of_rank(place.rank, message)}", file=sys.stderr, flush=True)
