"""The central scheduler: task graphs as plain data, and the scheduling rules as Lua scripts in Redis."""

from pipedec.scheduler.async_redis import AsyncRedisScheduler
from pipedec.scheduler.base import BaseScheduler, read_description
from pipedec.scheduler.client import connect
from pipedec.scheduler.client_scheduler import ClientScheduler
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.protocol import (
    FrameBatch,
    Granted,
    GrantedTask,
    Post,
    RankMessage,
    Remembered,
    RunStatus,
    Supervision,
    Taken,
)
from pipedec.scheduler.rank_scheduler import RankScheduler
from pipedec.scheduler.scripts import scripts_digest
from pipedec.scheduler.server import EmbeddedServer
from pipedec.scheduler.supervisor_scheduler import SupervisorScheduler
from pipedec.scheduler.transfers import PlannedTransfer, checked_transfers
from pipedec.scheduler.workflow import Payload, Planned, Task, after_window, initial_windows
from pipedec.topology import Topology

__all__ = [
    "AsyncRedisScheduler",
    "BaseScheduler",
    "ClientScheduler",
    "EmbeddedServer",
    "FrameBatch",
    "Granted",
    "GrantedTask",
    "Keys",
    "Payload",
    "Planned",
    "PlannedTransfer",
    "Post",
    "RankMessage",
    "RankScheduler",
    "Remembered",
    "RunStatus",
    "Supervision",
    "SupervisorScheduler",
    "Taken",
    "Task",
    "Topology",
    "after_window",
    "checked_transfers",
    "connect",
    "initial_windows",
    "read_description",
    "scripts_digest",
]
