"""Where the scheduler of a run is."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipedec.scheduler import RedisScheduler, connect
from pipedec.topology import Topology


@dataclass(frozen=True)
class RunAddress:
    """Where a run's scheduler is: a Redis URL (with its password: never print it) and the run's name."""

    redis_url: str = field(repr=False)
    run_id: str

    def scheduler(self, topology: Topology) -> RedisScheduler:
        """A scheduler client for ranks of this topology. Raises SchedulerLost if Redis cannot be reached."""
        return RedisScheduler(connect(self.redis_url), self.run_id, topology)
