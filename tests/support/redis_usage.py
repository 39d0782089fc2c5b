"""The load that a run is for its Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipedec.scheduler import BaseScheduler


@dataclass(frozen=True)
class RedisUsage:
    """Load on a Redis server.

    Attributes:
        cpu_seconds: CPU time of the server since it started.
        keys: number of keys of the run, without leases: one that is renewed late on a busy machine may be missing for a moment.
        is_working: whether a workflow is running, so that the number of keys varies.
    """

    cpu_seconds: float
    keys: int
    is_working: bool


def usage(scheduler: BaseScheduler) -> RedisUsage:
    """The CPU time of the server, and the state of the run's keys."""
    client, keys = scheduler.client, scheduler.keys
    cpu: Any = client.info("cpu")
    is_working = client.hget(keys.workflow, "running") == b"1"
    leases = (keys.alive_prefix, keys.node_prefix, keys.owner_prefix)
    stored = {key.decode() for key in client.scan_iter(match=keys.prefix + "*", count=1000)}  # a scan may name a key twice
    return RedisUsage(cpu["used_cpu_user"] + cpu["used_cpu_sys"], sum(not key.startswith(leases) for key in stored), is_working)
