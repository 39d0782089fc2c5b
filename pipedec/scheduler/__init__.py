"""The central scheduler: task graphs as plain data, the scheduling rules as Lua scripts in Redis, and their Python twin."""

from pipedec.scheduler.async_redis import AsyncRedisScheduler
from pipedec.scheduler.client import connect
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.memory import MemoryScheduler
from pipedec.scheduler.protocol import GrantedTask, Message, Post, Remembered, RunStatus, Scheduler, Shown, Supervision, Taken
from pipedec.scheduler.redis_scheduler import RedisScheduler
from pipedec.scheduler.scripts import scripts_digest
from pipedec.scheduler.server import EmbeddedServer
from pipedec.scheduler.transfers import Transfer, checked_transfers
from pipedec.scheduler.workflow import Facts, Payload, Planned, Task, initial_tasks, initial_windows, post_process
from pipedec.topology import Topology

__all__ = [
    "AsyncRedisScheduler",
    "EmbeddedServer",
    "Facts",
    "GrantedTask",
    "Keys",
    "MemoryScheduler",
    "Message",
    "Payload",
    "Planned",
    "Post",
    "RedisScheduler",
    "Remembered",
    "RunStatus",
    "Scheduler",
    "Shown",
    "Supervision",
    "Taken",
    "Task",
    "Topology",
    "Transfer",
    "checked_transfers",
    "connect",
    "initial_tasks",
    "initial_windows",
    "post_process",
    "scripts_digest",
]
