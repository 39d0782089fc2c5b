"""The scheduler that all ranks share: a thin client of the Lua scripts, which hold the rules. Key names are in keys.py."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from pipedec.core import Opening
from pipedec.messages import (
    Event,
    RunDescription,
    RunStats,
    StageStats,
    description_from_json,
    stage_stats_from_json,
    stats_from_json,
    to_json,
)
from pipedec.scheduler.client import BLOCK_SECONDS, DedicatedConnection, translated_errors
from pipedec.scheduler.client_calls import (
    KEY_SECONDS,
    LEASE_MS,
    cancel_call,
    close_call,
    events_read,
    look_call,
    submit_call,
)
from pipedec.scheduler.keys import STARTING, Keys
from pipedec.scheduler.protocol import (
    REQUEST_TRACE,
    SESSION_TRACE,
    GrantedTask,
    Message,
    Post,
    RunStatus,
    Taken,
    max_running,
)
from pipedec.scheduler.scripts import script_sha, script_text
from pipedec.scheduler.transfers import groups_text
from pipedec.scheduler.workflow import Planned, Task, initial_windows
from pipedec.topology import Topology, of_rank


@dataclass(frozen=True)
class ServerUsage:
    """CPU time that the Redis server has used since it started, and the number of keys of the run."""

    cpu_seconds: float
    keys: int


class RedisScheduler:
    """Implements ``Scheduler`` on one Redis server.

    One object serves one process. It reports tasks under the number of the workflow whose message it received last, so that
    a rank that was suspended for a while cannot finish tasks of a later one.
    """

    def __init__(self, client: redis.Redis, run_id: str, topology: Topology, lease_ms: int = LEASE_MS) -> None:
        self.client = client
        self._connection = DedicatedConnection(client)
        self.keys = Keys(run_id)
        self.topology = topology
        self.lease_ms = lease_ms
        self.round_trips = 0
        self._workflow = -1  # its number
        self._scripts: dict[str, Any] = {}
        self._stats = ""  # of this process's stage, as JSON
        options = client.connection_pool.connection_kwargs
        self._address = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self._entries = "," + ",".join(map(str, topology.entry_ranks)) + ","
        self._queues = [self.keys.queue(rank) for rank in topology.ranks]

    @property
    def server_host(self) -> str | None:
        """The host of the server; None if the connection is a Unix socket."""
        return self.client.connection_pool.connection_kwargs.get("host")

    @staticmethod
    def describe(client: redis.Redis, run_id: str) -> RunDescription | None:
        """The description given to ``open``; None if there is no such run. For clients, which do not know the topology yet.

        Raises:
            UserError: another version has opened the run.
        """
        options = client.connection_pool.connection_kwargs
        with translated_errors(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"):
            text: Any = client.hget(Keys(run_id).run, "description")
        return description_from_json(text.decode()) if text is not None else None

    def open(self, description: RunDescription, duplex: str = "full") -> None:
        limits = [max_running(description), description.max_waiting]
        self._run_script(
            "open", [self.keys.run], [KEY_SECONDS, to_json(description), groups_text(self.topology), duplex, *limits]
        )

    def begin_session(self, session: int, window: int) -> None:
        self._begin(session, SESSION_TRACE, initial_windows(self.topology, window), "")

    def begin(self, request_number: int, opening: Opening, planned: Sequence[Planned]) -> None:
        self._begin(request_number, REQUEST_TRACE if opening.trace else 0, planned, to_json(opening))

    def _begin(self, workflow: int, trace_lines: int, planned: Sequence[Planned], opening: str) -> None:
        arguments = [KEY_SECONDS, workflow, self._entries, trace_lines, _encode(planned), opening]
        self._run_script("begin", self._graph_keys(), arguments)
        self._workflow = workflow

    def finish(
        self, rank: int, task: Task, planned: Sequence[Planned], events: Sequence[tuple[int, Event]] = ()
    ) -> Message | None:
        texts = json.dumps([[number, to_json(event)] for number, event in events])
        keys = self._graph_keys()
        report = [self._workflow, rank, task.id, _encode(planned), texts, self.keys.answer_prefix]
        arguments = [len(keys), *keys, KEY_SECONDS, *report]
        with self._command():
            try:
                line = self._connection.call("EVALSHA", script_sha("finish"), *arguments)
            except redis.exceptions.NoScriptError:  # nothing has run: this server does not have the script yet
                line = self._connection.call("EVAL", script_text("finish"), *arguments)
        return self._message(line)

    def wait(self, rank: int, timeout_seconds: float) -> Message | None:
        if timeout_seconds <= 0:
            return self._lpop(self._queues[rank])
        deadline = time.monotonic() + timeout_seconds
        while (remaining := deadline - time.monotonic()) > 0:
            if (reply := self._blpop([self._queues[rank]], remaining)) is not None:
                return self._message(reply[1])
        return None

    def submit(self, request_json: str, priority: int = 0, owner: str = "") -> int:
        return int(self._run_script(*submit_call(self.keys, request_json, priority, owner, self.lease_ms)))

    def renew_owner(self, owner: str) -> bool:
        with self._command():
            return self.client.set(self.keys.owner(owner), "1", px=self.lease_ms, get=True) is not None

    def release_owner(self, owner: str) -> None:
        with self._command():
            self.client.delete(self.keys.owner(owner))

    def end_orphans(self) -> list[int]:
        keys = self.keys
        names = [keys.owners, keys.waiting, keys.requests, keys.running, keys.cancelled, keys.unread]
        return sorted(self._run_script("orphans", names, [KEY_SECONDS, keys.owner_prefix, keys.answer_prefix]))

    def take(self, limit: int) -> Taken:
        keys = self.keys
        names = [keys.run, keys.waiting, keys.requests, keys.running, keys.cancelled, keys.bell]
        state, cancelled, *taken = self._run_script("take", names, [KEY_SECONDS, limit])
        requests = [
            Message("request", int(number), text=text.decode()) for number, text in zip(taken[::2], taken[1::2], strict=True)
        ]
        return Taken(requests, sorted(map(int, cancelled)), state == b"stopping")

    def wait_request(self, timeout_seconds: float) -> Message | None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            if (message := self._lpop(self._queues[0])) is not None:
                return message
            if requests := self.take(1).requests:
                return requests[0]
            if (remaining := deadline - time.monotonic()) <= 0:
                return None
            reply = self._blpop([self._queues[0], self.keys.bell], remaining)
            if reply is not None and reply[0].decode() == self._queues[0]:
                return self._message(reply[1])

    def publish(self, request_number: int, *events: Event) -> None:
        self.publish_all([Post(request_number, events)])

    def complete(self, request_number: int, *events: Event) -> None:
        self.publish_all([Post(request_number, events, ends=True)])

    def publish_all(self, posts: Sequence[Post], stats: RunStats | None = None) -> None:
        keys = self.keys
        names = [keys.running, keys.cancelled, keys.unread, keys.run, *(keys.answer(post.number) for post in posts)]
        texts = [[post.number, int(post.ends), *map(to_json, post.events)] for post in posts]
        self._run_script("publish", names, [KEY_SECONDS, json.dumps(texts), "" if stats is None else to_json(stats)])

    def tell(self, stats: StageStats) -> None:
        self._stats = to_json(stats)

    def read_answer(self, request_number: int, last: str, timeout_seconds: float) -> list[tuple[str, Event]]:
        return [(position, event) for _, position, event in self.read_answers({request_number: last}, timeout_seconds)]

    def read_answers(self, last: Mapping[int, str], timeout_seconds: float) -> list[tuple[int, str, Event]]:
        streams: Any = {self.keys.answer(number): position for number, position in last.items()}
        deadline = time.monotonic() + timeout_seconds
        while True:
            remaining = min(deadline - time.monotonic(), BLOCK_SECONDS)
            with self._command():
                reply: Any = self.client.xread(streams, block=max(1, int(remaining * 1000)) if remaining > 0 else None)
            if reply:
                return events_read(self.keys, reply)
            if time.monotonic() >= deadline:
                return []

    def close_answer(self, request_number: int) -> None:
        self._run_script(*close_call(self.keys, request_number))

    def cancel(self, request_number: int) -> bool:
        return bool(self._run_script(*cancel_call(self.keys, request_number)))

    def abort(self, rank: int, message: str) -> bool:
        names = [self.keys.run, self.keys.waiting, self.keys.running, self.keys.unread, *self._queues]
        return bool(self._run_script("abort", names, [KEY_SECONDS, of_rank(rank, message), self.keys.answer_prefix]))

    def failure(self) -> str | None:
        with self._command():
            text: Any = self.client.hget(self.keys.run, "failure")
        return text.decode() if text is not None else None

    def stop(self) -> None:
        self._run_script("stop", [self.keys.run, *self._queues], [KEY_SECONDS])

    def renew_lease(self, rank: int) -> None:
        names = [self.keys.members, self.keys.alive(rank), self.keys.running, *self._lasting_keys()]
        self._run_script("lease", names, [KEY_SECONDS, self.lease_ms, rank, self.keys.answer_prefix, self._stats])

    def expired_ranks(self) -> list[int]:
        alive = [self.keys.alive(rank) for rank in self.topology.ranks]
        return sorted(self._run_script("expired", [self.keys.members, *alive], []))

    def leave(self, rank: int) -> None:
        self._run_script("leave", [self.keys.members, self.keys.alive(rank)], [rank])

    def members(self) -> list[int]:
        with self._command():
            ranks: Any = self.client.smembers(self.keys.members)
        return sorted(int(rank) for rank in ranks)

    def status(self) -> RunStatus:
        return status_of(self._run_script(*look_call(self.keys, self.topology)))

    def clock_us(self) -> int:
        with self._command():
            seconds, microseconds = self.client.time()
        return int(seconds) * 1_000_000 + int(microseconds)

    def trace(self) -> list[GrantedTask]:
        with self._command():
            lines: Any = self.client.lrange(self.keys.trace, 0, -1)
        fields = (line.decode().split(" ") for line in lines)
        return [GrantedTask(Task.parse(task), int(granted), int(finished)) for task, granted, finished in fields]

    def usage(self) -> ServerUsage:
        """CPU time of the server and number of the run's keys, for the benchmarks."""
        with self._command():
            cpu: Any = self.client.info("cpu")
        return ServerUsage(cpu["used_cpu_user"] + cpu["used_cpu_sys"], len(self._stored()))

    def clear(self) -> None:
        if stored := self._stored():
            with self._command():
                self.client.delete(*stored)

    def _stored(self) -> list[bytes]:
        """All keys of the run."""
        with self._command():
            return list(self.client.scan_iter(match=self.keys.prefix + "*", count=1000))

    def _lasting_keys(self) -> list[str]:
        """The keys that every rank keeps alive, beside those that ``lease.lua`` knows."""
        keys = self.keys
        graph = [keys.workflow, keys.done, keys.pending, keys.bitmap, keys.trace]
        queue = [keys.waiting, keys.requests, keys.bell, keys.cancelled, keys.unread, keys.owners]
        return [keys.run, keys.answer(STARTING), *graph, *queue, *self._queues]

    def _graph_keys(self) -> list[str]:
        keys = self.keys
        single = [keys.workflow, keys.done, keys.pending, keys.bitmap, keys.trace, keys.run]
        return [*single, keys.running, keys.cancelled, keys.unread, *self._queues]

    def _blpop(self, queues: list[str], timeout_seconds: float) -> Any:
        """[queue, element] of the first of ``queues`` that has one; None after ``timeout_seconds``, or ``BLOCK_SECONDS`` if these
        are fewer, so that a server that died silently is noticed.
        """
        with self._command():
            return self._connection.call("BLPOP", *queues, max(0.001, min(timeout_seconds, BLOCK_SECONDS)))

    def _lpop(self, queue: str) -> Message | None:
        with self._command():
            line: Any = self.client.lpop(queue)
        return self._message(line)

    def _message(self, line: bytes | None) -> Message | None:
        if line is None:
            return None
        message = Message.from_json(line)
        if message.kind in ("open", "task"):
            self._workflow = message.number
        return message

    def _run_script(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.client.register_script(script_text(name))
        with self._command():
            return script(keys=keys, args=arguments)

    @contextmanager
    def _command(self) -> Iterator[None]:
        self.round_trips += 1
        with translated_errors(self._address):
            yield


def status_of(looked: Sequence[Any]) -> RunStatus:
    """What ``look.lua`` has returned. Raises UserError if another version has written the counters."""
    (failure, state, submitted, stats, *stages), running, waiting, alive, expired = looked
    return RunStatus(
        state=state.decode() if state is not None else "gone",
        submitted=int(submitted or 0),
        waiting=waiting,
        running=tuple(sorted(map(int, running))),
        alive=tuple(sorted(alive)),
        expired=tuple(sorted(expired)),
        failure=failure.decode() if failure is not None else None,
        stats=stats_from_json(stats.decode()) if stats is not None else None,
        stages=tuple(stage_stats_from_json(stage.decode()) for stage in stages if stage is not None),
    )


def _encode(planned: Sequence[Planned]) -> str:
    return json.dumps([[plan.task.id, [task.id for task in plan.after], json.dumps(plan.payload)] for plan in planned])
