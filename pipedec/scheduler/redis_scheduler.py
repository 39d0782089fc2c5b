"""The scheduler that all ranks share: a thin client of the Lua scripts, which hold the rules. Key names are in keys.py."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from pipedec.messages import CancelledEvent, Event, Opening, RunDescription, description_from_json, event_from_json, to_json
from pipedec.scheduler.client import BLOCK_SECONDS, DedicatedConnection, translated_errors
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.protocol import GrantedTask, Message, RunStatus
from pipedec.scheduler.scripts import script_text
from pipedec.scheduler.workflow import Planned, Task
from pipedec.topology import Topology, of_rank

KEY_SECONDS = 60  # time to live of the run's keys, renewed with every lease
LEASE_MS = 5000


@dataclass(frozen=True)
class ServerUsage:
    """CPU time that the Redis server has used since it started, and the number of keys of the run."""

    cpu_seconds: float
    keys: int


class RedisScheduler:
    """Implements ``Scheduler`` on one Redis server.

    One object serves one process. It reports tasks under the number of the request whose message it received last, so that
    a rank that was suspended for a while cannot finish tasks of a later request.
    """

    def __init__(self, client: redis.Redis, run_id: str, topology: Topology, lease_ms: int = LEASE_MS) -> None:
        self.client = client
        self._connection = DedicatedConnection(client)
        self.keys = Keys(run_id)
        self.topology = topology
        self.lease_ms = lease_ms
        self.round_trips = 0
        self._request_number = -1
        self._scripts: dict[str, Any] = {}
        options = client.connection_pool.connection_kwargs
        self._address = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self._finish_sha = hashlib.sha1(script_text("finish").encode()).hexdigest()
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

    def open(self, description: RunDescription) -> None:
        self._run_script("open", [self.keys.run], [KEY_SECONDS, to_json(description)])

    def begin(self, request_number: int, opening: Opening, planned: Sequence[Planned]) -> None:
        self._request_number = request_number
        arguments = [KEY_SECONDS, request_number, self._entries, int(opening.trace), _encode(planned), to_json(opening)]
        self._run_script("begin", self._graph_keys(), arguments)

    def finish(self, rank: int, task: Task, planned: Sequence[Planned], events: Sequence[Event] = ()) -> Message | None:
        texts = json.dumps([to_json(event) for event in events])
        keys = self._graph_keys()
        arguments = [len(keys), *keys, KEY_SECONDS, self._request_number, rank, task.id, _encode(planned), texts]
        with self._command():
            try:
                line = self._connection.call("EVALSHA", self._finish_sha, *arguments)
            except redis.exceptions.NoScriptError:  # nothing has run: this server does not have the script yet
                line = self._connection.call("EVAL", script_text("finish"), *arguments)
        return self._message(line)

    def wait(self, rank: int, timeout_seconds: float) -> Message | None:
        return self._pop([self._queues[rank]], timeout_seconds)

    def submit(self, request_json: str) -> int:
        return int(self._run_script("submit", [self.keys.run, self.keys.requests], [KEY_SECONDS, request_json]))

    def wait_request(self, timeout_seconds: float) -> Message | None:
        return self._pop([self._queues[0], self.keys.requests], timeout_seconds)

    def publish(self, request_number: int, *events: Event) -> None:
        with self._command():
            pipe = self.client.pipeline(transaction=True)
            for event in events:
                pipe.xadd(self.keys.answer(request_number), {"event": to_json(event)}, maxlen=16384, approximate=True)
            pipe.expire(self.keys.answer(request_number), KEY_SECONDS)
            pipe.execute()

    def read_answer(self, request_number: int, last: str, timeout_seconds: float) -> list[tuple[str, Event]]:
        return [(position, event) for _, position, event in self.read_answers({request_number: last}, timeout_seconds)]

    def read_answers(self, last: Mapping[int, str], timeout_seconds: float) -> list[tuple[int, str, Event]]:
        numbers = {self.keys.answer(number).encode(): number for number in last}
        streams: Any = {self.keys.answer(number): position for number, position in last.items()}
        deadline = time.monotonic() + timeout_seconds
        while True:
            remaining = min(deadline - time.monotonic(), BLOCK_SECONDS)
            with self._command():
                reply: Any = self.client.xread(streams, block=max(1, int(remaining * 1000)) if remaining > 0 else None)
            if reply:
                return [
                    (numbers[stream], position.decode(), event_from_json(fields[b"event"]))
                    for stream, entries in reply
                    for position, fields in entries
                ]
            if time.monotonic() >= deadline:
                return []

    def close_answer(self, request_number: int) -> None:
        with self._command():
            self.client.delete(self.keys.answer(request_number))

    def cancel(self, request_number: int) -> bool:
        keys = self.keys
        names = [keys.run, keys.workflow, keys.requests, keys.cancelled, keys.answer(request_number)]
        return bool(self._run_script("cancel", names, [KEY_SECONDS, request_number, to_json(CancelledEvent())]))

    def is_cancelled(self, request_number: int) -> bool:
        with self._command():
            found = self.client.hmget(self.keys.workflow, "number", "cancelled")
        return found == [str(request_number).encode(), b"1"]

    def abort(self, rank: int, message: str) -> bool:
        names = [self.keys.run, self.keys.workflow, self.keys.requests, *self._queues]
        return bool(self._run_script("abort", names, [KEY_SECONDS, of_rank(rank, message), self.keys.answer_prefix]))

    def failure(self) -> str | None:
        with self._command():
            text: Any = self.client.hget(self.keys.run, "failure")
        return text.decode() if text is not None else None

    def stop(self) -> None:
        self._run_script("stop", [self.keys.run, *self._queues], [KEY_SECONDS])

    def renew_lease(self, rank: int) -> None:
        names = [self.keys.members, self.keys.alive(rank), *self._lasting_keys()]
        self._run_script("lease", names, [KEY_SECONDS, self.lease_ms, rank])

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
        keys = self.keys
        with self._command():
            pipe = self.client.pipeline(transaction=True)
            pipe.hmget(keys.run, "state", "submitted")
            pipe.hmget(keys.workflow, "running", "number")
            pipe.llen(keys.requests)
            pipe.smembers(keys.members)
            (state, submitted), (running, number), waiting, members = pipe.execute()
        return RunStatus(
            state=state.decode() if state is not None else "gone",
            submitted=int(submitted or 0),
            waiting=waiting,
            running=int(number) if running == b"1" else None,
            alive=tuple(sorted({int(rank) for rank in members} - set(self.expired_ranks()))),
        )

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
        with self._command():
            keys = sum(1 for _ in self.client.scan_iter(match=self.keys.prefix + "*", count=1000))
        return ServerUsage(cpu["used_cpu_user"] + cpu["used_cpu_sys"], keys)

    def clear(self) -> None:
        keys = self.keys
        alive = [keys.alive(rank) for rank in self.topology.ranks]
        with self._command():
            submitted: Any = self.client.hget(keys.run, "submitted")
        answers = [keys.answer(number) for number in range(int(submitted or 0))]
        with self._command():
            self.client.delete(keys.members, *alive, *self._lasting_keys(), *answers)

    def _lasting_keys(self) -> list[str]:
        keys = self.keys
        single = [keys.run, keys.workflow, keys.done, keys.pending, keys.bitmap, keys.trace, keys.requests, keys.cancelled]
        return [*single, keys.answer(self._request_number), *self._queues]

    def _graph_keys(self) -> list[str]:
        keys = self.keys
        single = [keys.workflow, keys.done, keys.pending, keys.bitmap, keys.trace, keys.run]
        return [*single, keys.answer(self._request_number), keys.cancelled, *self._queues]

    def _pop(self, queues: list[str], timeout_seconds: float) -> Message | None:
        """The first message of ``queues``, in this order: by LPOP without a timeout, else by BLPOP.

        A long timeout is split into waits of ``BLOCK_SECONDS``, so that a server that died silently is noticed.
        """
        if timeout_seconds <= 0:
            return next((message for queue in queues if (message := self._take(queue)) is not None), None)
        deadline = time.monotonic() + timeout_seconds
        while (remaining := deadline - time.monotonic()) > 0:
            with self._command():
                reply = self._connection.call("BLPOP", *queues, max(0.001, min(remaining, BLOCK_SECONDS)))
            if reply is not None:
                return self._message(reply[1])
        return None

    def _take(self, queue: str) -> Message | None:
        with self._command():
            line: Any = self.client.lpop(queue)
        return self._message(line)

    def _message(self, line: bytes | None) -> Message | None:
        if line is None:
            return None
        message = Message.from_json(line)
        if message.kind in ("open", "task"):
            self._request_number = message.number
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


def _encode(planned: Sequence[Planned]) -> str:
    return json.dumps([[plan.task.id, [task.id for task in plan.after], json.dumps(plan.payload)] for plan in planned])
