"""The central scheduler: task graphs as plain data, and the scheduling rules as Lua scripts in Redis."""

from pipedec.scheduler import calls
from pipedec.scheduler.base import BaseScheduler, read_description
from pipedec.scheduler.client import connect
from pipedec.scheduler.client_scheduler import AsyncConnection, ClientScheduler, OwnerLease
from pipedec.scheduler.protocol import FrameBatch, GrantedTask, RunStatus, Supervision
from pipedec.scheduler.rank_scheduler import RankScheduler, SupervisorScheduler
from pipedec.scheduler.redis_process import EmbeddedRedis
from pipedec.scheduler.scripts import scripts_digest
from pipedec.scheduler.workflow import Task

__all__ = [
    "AsyncConnection", "BaseScheduler", "ClientScheduler", "EmbeddedRedis", "FrameBatch", "GrantedTask", "OwnerLease",
    "RankScheduler", "RunStatus", "Supervision", "SupervisorScheduler", "Task", "calls", "connect", "read_description",
    "scripts_digest",
]  # fmt: skip
