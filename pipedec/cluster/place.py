"""Where a rank runs and how it reaches its run: the data with which its process starts, and their comparison with the plan.

Loads no torch.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

from pipedec.cluster.network import is_this_host
from pipedec.config import ServerConfig
from pipedec.core.errors import UserError
from pipedec.plan.placement import Placement
from pipedec.scheduler import BaseScheduler, connect
from pipedec.topology import Topology, rank_name

_Scheduler = TypeVar("_Scheduler", bound=BaseScheduler)

# What the rank does, how many units are done, how many there are; or "digests", and those of what it reads, by model and name.
Report = Callable[[str, Any, int], None]


@dataclass(frozen=True)
class RankPlace:
    """Which rank a process is."""

    rank: int
    world_size: int
    local_rank: int  # its number among the ranks of its host
    local_world_size: int  # how many ranks its host has
    host: str | None = None  # the host of cluster.yaml on which it was started, if known
    recovers: bool = False  # whether lost ranks are replaced; if not, the loss of one ends the run
    # Whether this process goes on when another rank is lost; if not, it ends and all ranks are started again
    survives: bool = True
    # Digests of the tensors with which the run began, by model and name, as far as they are known
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False, hash=False)
    lists: bool = False  # whether it digests all tensors on its host, for comparison with the other hosts'

    @property
    def has_others_elsewhere(self) -> bool:
        """Whether the run has ranks on other hosts, or may yet have."""
        return self.local_world_size < self.world_size


@dataclass(frozen=True)
class RunAddress:
    """Where a run's scheduler is: a Redis URL (with its password: never print it) and the run's name."""

    redis_url: str = field(repr=False)
    run_id: str

    def scheduler(self, kind: type[_Scheduler], topology: Topology) -> _Scheduler:
        """The run's scheduler for a rank, a client or a supervisor. Raises SchedulerLost if Redis cannot be reached."""
        return kind(connect(self.redis_url), self.run_id, topology)


def checked_host(place: RankPlace, places: Sequence[Placement] | None, servers: Sequence[ServerConfig]) -> str:
    """The name of this host: in the plan (``places`` of every rank, on ``servers``), else what the machine calls itself.
    Raises UserError if the plan puts the rank on another host, or this host cannot be identified.
    """
    own = socket.gethostname()
    if places is None:
        return own
    planned = places[place.rank].host
    known = is_this_host(next(server for server in servers if server.host == planned))
    if known or (known is None and place.host == planned):
        return planned
    order = ", ".join(host for host, _ in groupby(one.host for one in places))
    mend = "correct its ssh destination" if place.host else f"start the hosts in the order {order}"
    raise UserError(
        f"{rank_name(place.rank)} was started on {own}, but the plan puts it on {planned}: {mend} (or, if {own} is {planned}, "
        "set its hostname in cluster.yaml)"
    )
