"""The central scheduler: task graphs as plain data, and the scheduling rules as Lua scripts in Redis."""

from pipedec.scheduler.base import BaseScheduler, read_description
from pipedec.scheduler.client import connect
from pipedec.scheduler.client_scheduler import AsyncRedisScheduler, ClientScheduler
from pipedec.scheduler.protocol import FrameBatch, GrantedTask, RunStatus, Supervision
from pipedec.scheduler.rank_scheduler import RankScheduler, SupervisorScheduler
from pipedec.scheduler.scripts import scripts_digest
from pipedec.scheduler.server import EmbeddedServer
from pipedec.scheduler.workflow import Task

__all__ = [
    "AsyncRedisScheduler", "BaseScheduler", "ClientScheduler", "EmbeddedServer", "FrameBatch", "GrantedTask", "RankScheduler",
    "RunStatus", "Supervision", "SupervisorScheduler", "Task", "connect", "read_description", "scripts_digest",
]  # fmt: skip
