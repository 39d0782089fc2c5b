"""The data with which a rank's process starts: its rank, the scheduler of its run, where to report. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipedec.scheduler import BaseScheduler, connect
from pipedec.topology import Topology

_Scheduler = TypeVar("_Scheduler", bound=BaseScheduler)

# What the rank does, how many units are done, how many there are; or "digests", and those of what it reads, by model and name.
Report = Callable[[str, Any, int], None]


@dataclass(frozen=True)
class RankPlace:
    """Which rank a process is.

    Attributes:
        local_rank, local_world_size: its number among the ranks of its host, and theirs.
        host: the host of cluster.yaml on which it was started, if known.
        recovers: whether lost ranks are replaced; if not, the loss of one ends the run.
        survives: whether this process goes on when another rank is lost; if not, it ends and all ranks are started again.
        digests: of the tensors with which the run began, by model and name, as far as they are known.
        lists: whether it digests all tensors that its host has, so that the others are compared with them.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str | None = None
    recovers: bool = False
    survives: bool = True
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False, hash=False)
    lists: bool = False

    @property
    def has_others_elsewhere(self) -> bool:
        """Whether the run has ranks on other hosts, or may yet have."""
        return self.local_world_size < self.world_size

    @property
    def speaks_for_host(self) -> bool:
        """Whether it is the rank that compares its host with the others, if the run has ranks elsewhere."""
        return self.local_rank == 0 and self.has_others_elsewhere


@dataclass(frozen=True)
class RunAddress:
    """Where a run's scheduler is: a Redis URL (with its password: never print it) and the run's name."""

    redis_url: str = field(repr=False)
    run_id: str

    def scheduler(self, kind: type[_Scheduler], topology: Topology) -> _Scheduler:
        """The run's scheduler for a rank, a client or a supervisor. Raises SchedulerLost if Redis cannot be reached."""
        return kind(connect(self.redis_url), self.run_id, topology)
