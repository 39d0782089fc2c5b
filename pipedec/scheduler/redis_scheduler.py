"""The scheduler that all ranks share: a thin client of the Lua scripts, which hold the rules. Key names are in keys.py."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import redis
from msgspec import structs

from pipedec.core import EpochEnded
from pipedec.messages import Activity, Event, Recovery, RunDescription, RunStats, StageStats, to_json
from pipedec.scheduler.client import BLOCK_SECONDS, PATIENCE_SECONDS, DedicatedConnection, patiently, translated_errors
from pipedec.scheduler.client_calls import (
    KEY_SECONDS,
    LEASE_MS,
    cancel_call,
    close_call,
    events_read,
    look_call,
    shown_of,
    submit_call,
)
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.protocol import (
    RESTORED,
    SHOWN_BATCHES,
    SHOWN_SECONDS,
    WATCH_SECONDS,
    GrantedTask,
    Message,
    Post,
    Remembered,
    RunStatus,
    Shown,
    Supervision,
    Taken,
    tokens_told,
)
from pipedec.scheduler.scripts import script_sha, script_text
from pipedec.scheduler.transfers import groups_text
from pipedec.scheduler.workflow import Planned, Task
from pipedec.topology import Topology, of_rank
from pipedec.validation import parse_json

KEPT_RECOVERIES = 20
NODE_LEASE_MS = 3000

_T = TypeVar("_T")


@dataclass(frozen=True)
class ServerUsage:
    """Load on the Redis server.

    Attributes:
        cpu_seconds: CPU time that the server has used since it started.
        keys: number of keys of the run, without leases.
        is_working: whether a workflow is running: until it has ended, keys come and go.
    """

    cpu_seconds: float
    keys: int
    is_working: bool


class RedisScheduler:
    """Implements ``Scheduler`` on one Redis server.

    One object serves one process. It reports tasks under the number of the session whose message it received last, so that a rank
    that was suspended for a while cannot finish tasks of a later one.

    Args:
        patience_seconds: how long Redis may carry out no commands because it is busy or has no memory, before a call raises
            SchedulerBusy. Requests are refused at once.
    """

    def __init__(
        self, client: redis.Redis, run_id: str, topology: Topology, lease_ms: int = LEASE_MS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:  # fmt: skip
        self.client = client
        self._connection = DedicatedConnection(client)
        self.keys = Keys(run_id)
        self.topology = topology
        self.lease_ms = lease_ms
        self.patience_seconds = patience_seconds
        self.round_trips = 0
        self._workflow = -1  # its number
        self._knows_finish = False  # the server has been given the script
        self._scripts: dict[str, Any] = {}
        self._num_shown = 0  # batches of the live feed
        self._operations: dict[int, str] = {}  # by which requests were submitted, until their answers are closed
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
        return parse_json(RunDescription, text, "the description of the run") if text is not None else None

    @property
    def run_id(self) -> str:
        return self.keys.run_id

    @property
    def epoch(self) -> int:
        """In which this process takes part."""
        return self.keys.epoch

    def current_epoch(self) -> int | None:
        epoch: Any = self._ask(lambda: self.client.hget(self.keys.run, "epoch"))
        return None if epoch is None else int(epoch)

    def enter(self, epoch: int) -> None:
        self.keys = replace(self.keys, epoch=epoch)
        self._queues = [self.keys.queue(rank) for rank in self.topology.ranks]
        self._workflow = -1

    def recover(self, lost: Sequence[int], reason: str, places: Mapping[int, str] = MappingProxyType({})) -> int:
        keys, ranks = self.keys, self.topology.ranks
        told = [*self._told_keys(), keys.recoveries]
        names = [keys.run, keys.members, keys.running, keys.attempts, *told, keys.bell, keys.waiting]
        ended = [keys.workflow, keys.done, keys.trace, keys.answer(keys.meeting)]
        arguments = [json.dumps(list(lost)), reason, len(ranks), KEPT_RECOVERIES, json.dumps(list(places.items()))]
        names += [*map(keys.alive, ranks), *self._queues, *ended]
        return int(self._run_script("recover", names, [KEY_SECONDS, self.epoch, *arguments]))

    def journal(self) -> list[Message]:
        pipe = self.client.pipeline(transaction=True)
        pipe.smembers(self.keys.running)
        pipe.hgetall(self.keys.requests)
        pipe.hgetall(self.keys.attempts)
        running, requests, attempts = self._ask(lambda: pipe.execute())
        found = []
        for number in sorted(map(int, running)):
            field = str(number).encode()
            told = tokens_told(event for _, event in self.read_answer(number, "0", 0))
            found.append(
                Message("request", number, text=requests[field].decode(), told=told, attempts=int(attempts.get(field, 0)))
            )
        return found

    def suspect(self, rank: int, message: str) -> None:
        self._note(self.keys.suspects, rank, message)

    def note_end(self, rank: int, message: str) -> None:
        self._note(self.keys.ends, rank, message)

    def _note(self, notes: str, rank: int, message: str) -> None:
        self._run_script("note", [self.keys.run, notes], [KEY_SECONDS, rank, message, self.epoch])

    def supervise(self, node: str, ranks: Sequence[int] = ()) -> Supervision:
        """For the supervisor ``node`` of a host, in one round trip: all that it decides by. Renews its lease.

        Args:
            ranks: that run on this host; they are its own from now on, unless another host has them.
        """
        keys = self.keys
        names = [keys.run, keys.members, *self._told_keys(), keys.recoveries, keys.nodes, keys.node(node)]
        names += map(keys.alive, self.topology.ranks)
        about = [KEY_SECONDS, node, NODE_LEASE_MS, keys.node_prefix, json.dumps(list(ranks))]
        return _supervision_of(self._run_script("supervise", names, about))

    def nodes(self) -> dict[str, bool]:
        """The supervisors of hosts, by name: whether they hold their leases."""
        names: Any = self._ask(lambda: self.client.smembers(self.keys.nodes))
        found = sorted(name.decode() for name in names)
        alive: Any = self._ask(lambda: self.client.mget([self.keys.node(name) for name in found])) if found else []
        return {name: lease is not None for name, lease in zip(found, alive, strict=True)}

    def places(self) -> dict[int, str]:
        """On which host each rank runs, as far as supervisors have told."""
        told: Any = self._ask(lambda: self.client.hgetall(self.keys.places))
        return {int(rank): node.decode() for rank, node in told.items()}

    def open(self, description: RunDescription, duplex: str = "full", recovers: bool = False) -> None:
        limits = [description.settings.limits.max_num_seqs, description.settings.limits.max_waiting]
        about = [to_json(description), groups_text(self.topology), duplex, *limits, self.epoch, int(recovers)]
        self._run_script("open", [self.keys.run, self.keys.recoveries, *self._queues], [KEY_SECONDS, *about])

    def restore(self, description: RunDescription, duplex: str, submitted: int, remembered: Sequence[Remembered]) -> int:
        keys, limits = self.keys, [description.settings.limits.max_num_seqs, description.settings.limits.max_waiting]
        about = [to_json(description), groups_text(self.topology), duplex, *limits, submitted, RESTORED]
        texts = [[one.number, one.request, *map(to_json, one.events)] for one in remembered]
        names = [keys.run, keys.running, keys.requests, keys.recoveries, *(keys.answer(one.number) for one in remembered)]
        return int(self._run_script("restore", names, [KEY_SECONDS, self.epoch, *about, json.dumps(texts)]))

    def begin_session(self, session: int, planned: Sequence[Planned], trace_lines: int) -> None:
        arguments = [KEY_SECONDS, session, self._entries, trace_lines, _encode(planned), self.epoch]
        self._run_script("begin", self._graph_keys(), arguments)
        self._workflow = session

    def report(
        self,
        rank: int,
        done: Sequence[Task],
        planned: Sequence[Planned],
        timeout_seconds: float = 0.0,
        trace_lines: int | None = None,
    ) -> Message | None:
        keys, ids = self._graph_keys(), json.dumps([task.id for task in done])
        about = [KEY_SECONDS, self._workflow, ids, _encode(planned), self.epoch, "" if trace_lines is None else trace_lines]
        commands: list[list[Any]] = [["EVALSHA", script_sha("finish"), len(keys), *keys, *about]]
        if timeout_seconds > 0:
            commands.append(["BLPOP", self._queues[rank], min(timeout_seconds, BLOCK_SECONDS)])
        *_, reply = self._ask(partial(self._exchange, commands))
        return self._message(reply[1]) if timeout_seconds > 0 and reply is not None else None

    def _exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        if not self._knows_finish:  # a server that does not know the script would let the other command wait
            self.client.script_load(script_text("finish"))
            self._knows_finish = True
        try:
            return self._connection.call_all(commands)
        except redis.exceptions.NoScriptError:  # nothing has run
            self._knows_finish = False
            return self._exchange(commands)

    def wait(self, rank: int, timeout_seconds: float) -> Message | None:
        if timeout_seconds <= 0:
            return self._lpop(self._queues[rank])
        deadline = time.monotonic() + timeout_seconds
        while (remaining := deadline - time.monotonic()) > 0:
            if (reply := self._blpop([self._queues[rank]], remaining)) is not None:
                return self._message(reply[1])
        return None

    def submit(self, request_json: str, priority: int = 0, owner: str = "", operation: str = "") -> int:
        call = submit_call(self.keys, request_json, priority, owner, operation, self.lease_ms)
        number = int(self._run_script(*call, patience_seconds=0.0))
        if operation:
            self._operations[number] = operation
        return number

    def renew_owner(self, owner: str) -> bool:
        return self._ask(lambda: self.client.set(self.keys.owner(owner), "1", px=self.lease_ms, get=True) is not None)

    def release_owner(self, owner: str) -> None:
        self._ask(lambda: self.client.delete(self.keys.owner(owner)))

    def end_orphans(self) -> list[int]:
        keys = self.keys
        names = [keys.owners, keys.waiting, keys.requests, keys.running, keys.cancelled, keys.unread, keys.run]
        return sorted(self._run_script("orphans", names, [KEY_SECONDS, keys.owner_prefix, keys.answer_prefix, self.epoch]))

    def take(self, limit: int) -> Taken:
        keys = self.keys
        names = [keys.run, keys.waiting, keys.requests, keys.running, keys.cancelled, keys.bell, keys.watchers]
        state, cancelled, watcher, *taken = self._run_script("take", names, [KEY_SECONDS, limit, self.epoch])
        requests = [
            Message("request", int(number), text=text.decode()) for number, text in zip(taken[::2], taken[1::2], strict=True)
        ]
        return Taken(requests, sorted(map(int, cancelled)), state == b"stopping", watcher.decode())

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
        names = [keys.running, keys.cancelled, keys.unread, keys.run, keys.requests, keys.attempts]
        names += (keys.answer(post.number) for post in posts)
        texts = [[post.number, int(post.ends), *map(to_json, post.events)] for post in posts]
        self._run_script("publish", names, [KEY_SECONDS, json.dumps(texts), "" if stats is None else to_json(stats), self.epoch])

    def tell(self, stats: StageStats) -> None:
        self._stats = to_json(stats)

    def watch(self, begins: bool = False) -> None:
        milliseconds = int(1000 * WATCH_SECONDS)
        if begins or not self._ask(lambda: self.client.pexpire(self.keys.watchers, milliseconds)):
            self._ask(lambda: self.client.set(self.keys.watchers, secrets.token_hex(8), px=milliseconds))

    def live_position(self) -> str:
        newest: Any = self._ask(lambda: self.client.xrevrange(self.keys.live, count=1))
        return newest[0][0].decode() if newest else "0-0"

    def show(self, frames: Sequence[str]) -> None:
        self._num_shown += 1
        pipe = self.client.pipeline(transaction=True)
        pipe.xadd(self.keys.live, {"number": self._num_shown, "frames": f"[{','.join(frames)}]"}, maxlen=SHOWN_BATCHES)
        pipe.pexpire(self.keys.live, int(1000 * SHOWN_SECONDS))
        self._ask(pipe.execute)

    def read_live(self, last: str, timeout_seconds: float) -> list[Shown]:
        block = max(1, int(min(timeout_seconds, BLOCK_SECONDS) * 1000))
        reply: Any = self._ask(lambda: self.client.xread({self.keys.live: last}, block=block))
        return shown_of(reply)

    def read_answer(self, request_number: int, last: str, timeout_seconds: float) -> list[tuple[str, Event]]:
        return [(position, event) for _, position, event in self.read_answers({request_number: last}, timeout_seconds)]

    def read_answers(self, last: Mapping[int, str], timeout_seconds: float) -> list[tuple[int, str, Event]]:
        streams: Any = {self.keys.answer(number): position for number, position in last.items()}
        deadline = time.monotonic() + timeout_seconds
        while True:
            remaining = min(deadline - time.monotonic(), BLOCK_SECONDS)
            block = max(1, int(remaining * 1000)) if remaining > 0 else None
            reply: Any = self._ask(partial(self.client.xread, streams, block=block))
            if reply:
                return events_read(self.keys, reply)
            if time.monotonic() >= deadline:
                return []

    def close_answer(self, request_number: int) -> None:
        self._run_script(*close_call(self.keys, request_number, self._operations.pop(request_number, "")))

    def cancel(self, request_number: int) -> bool:
        return bool(self._run_script(*cancel_call(self.keys, request_number)))

    def abort(self, rank: int, message: str) -> bool:
        names = [self.keys.run, self.keys.waiting, self.keys.running, self.keys.unread, *self._queues]
        return bool(self._run_script("abort", names, [KEY_SECONDS, of_rank(rank, message), self.keys.answer_prefix, self.epoch]))

    def failure(self) -> str | None:
        text: Any = self._ask(lambda: self.client.hget(self.keys.run, "failure"))
        return text.decode() if text is not None else None

    def stop(self) -> None:
        while True:  # a client takes part in no epoch
            epoch = self.current_epoch() or 0
            keys = replace(self.keys, epoch=epoch)
            with suppress(EpochEnded):
                self._run_script("stop", [keys.run, *map(keys.queue, self.topology.ranks)], [KEY_SECONDS, epoch])
                return

    def renew_lease(self, rank: int, activity: Activity | None = None) -> None:
        keys = self.keys
        names = [keys.members, keys.alive(rank), keys.running, keys.run, keys.doing, *self._lasting_keys()]
        doing = "" if activity is None else to_json(activity)
        self._run_script("lease", names, [KEY_SECONDS, self.lease_ms, rank, keys.answer_prefix, self._stats, doing, self.epoch])

    def activities(self) -> dict[int, Activity]:
        """Return what each rank was doing when it last renewed its lease."""
        told: Any = self._ask(lambda: self.client.hgetall(self.keys.doing))
        now_us = self.clock_us()
        return {int(rank): _activity(text.decode(), now_us) for rank, text in told.items()}

    def expired_ranks(self) -> list[int]:
        alive = [self.keys.alive(rank) for rank in self.topology.ranks]
        return sorted(self._run_script("expired", [self.keys.members, *alive], []))

    def leave(self, rank: int) -> None:
        self._run_script("leave", [self.keys.members, self.keys.alive(rank), self.keys.run], [rank, self.epoch])

    def members(self) -> list[int]:
        ranks: Any = self._ask(lambda: self.client.smembers(self.keys.members))
        return sorted(int(rank) for rank in ranks)

    def status(self) -> RunStatus:
        return status_of(self._run_script(*look_call(self.keys, self.topology)))

    def clock_us(self) -> int:
        seconds, microseconds = self._ask(lambda: self.client.time())
        return int(seconds) * 1_000_000 + int(microseconds)

    def trace(self) -> list[GrantedTask]:
        lines: Any = self._ask(lambda: self.client.lrange(self.keys.trace, 0, -1))
        fields = (line.decode().split(" ") for line in lines)
        return [GrantedTask(Task.parse(task), int(granted), int(finished)) for task, granted, finished in fields]

    def usage(self) -> ServerUsage:
        """Return the CPU time of the server and the state of the run's keys, for the benchmarks.

        Leases are not counted: on a busy machine one may be renewed too late, and be missing for a moment.
        """
        cpu: Any = self._ask(lambda: self.client.info("cpu"))
        is_working = self._ask(lambda: self.client.hget(self.keys.workflow, "running")) == b"1"
        stored = {key.decode() for key in self._stored()}  # a scan may name a key twice
        num_keys = sum(not self.keys.is_lease(key) for key in stored)
        return ServerUsage(cpu["used_cpu_user"] + cpu["used_cpu_sys"], num_keys, is_working)

    def clear(self) -> None:
        if stored := self._stored():
            self._ask(lambda: self.client.delete(*stored))

    def _stored(self) -> list[bytes]:
        """All keys of the run."""
        return self._ask(lambda: list(self.client.scan_iter(match=self.keys.prefix + "*", count=1000)))

    def _lasting_keys(self) -> list[str]:
        """The keys that every rank keeps alive, beside those that ``lease.lua`` knows."""
        keys = self.keys
        graph = [keys.workflow, keys.done, keys.trace]
        queue = [keys.waiting, keys.requests, keys.bell, keys.cancelled, keys.unread, keys.owners, keys.attempts]
        told = [keys.suspects, keys.ends, keys.places, keys.recoveries, keys.nodes]
        return [keys.answer(keys.meeting), *graph, *queue, *told, *self._queues]

    def _told_keys(self) -> list[str]:
        """What ranks tell supervisors, and supervisors each other."""
        return [self.keys.doing, self.keys.suspects, self.keys.ends, self.keys.places]

    def _graph_keys(self) -> list[str]:
        keys = self.keys
        return [keys.workflow, keys.done, keys.trace, keys.run, *self._queues]

    def _blpop(self, queues: list[str], timeout_seconds: float) -> Any:
        """[queue, element] of the first of ``queues`` that has one; None after ``timeout_seconds``, or ``BLOCK_SECONDS`` if these
        are fewer, so that a server that died silently is noticed.
        """
        return self._ask(lambda: self._connection.call("BLPOP", *queues, max(0.001, min(timeout_seconds, BLOCK_SECONDS))))

    def _lpop(self, queue: str) -> Message | None:
        line: Any = self._ask(lambda: self.client.lpop(queue))
        return self._message(line)

    def _message(self, line: bytes | None) -> Message | None:
        if line is None:
            return None
        message = Message.from_json(line)
        if message.kind == "tasks":
            self._workflow = message.number
        return message

    def _run_script(self, name: str, keys: Sequence[str], arguments: Sequence[Any], patience_seconds: float | None = None) -> Any:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.client.register_script(script_text(name))
        return self._ask(lambda: script(keys=keys, args=arguments), patience_seconds)

    def _ask(self, command: Callable[[], _T], patience_seconds: float | None = None) -> _T:
        self.round_trips += 1
        return patiently(command, self._address, self.patience_seconds if patience_seconds is None else patience_seconds)


def status_of(looked: Sequence[Any]) -> RunStatus:
    """What ``look.lua`` has returned. Raises UserError if another version has written the counters."""
    run, running, waiting, alive, expired, recoveries = looked
    failure, state, submitted, epoch, serving, recovers, num_recoveries, stats, *stages = run
    return RunStatus(
        state=state.decode() if state is not None else "gone",
        submitted=int(submitted or 0),
        waiting=waiting,
        running=tuple(sorted(map(int, running))),
        alive=tuple(sorted(alive)),
        expired=tuple(sorted(expired)),
        failure=failure.decode() if failure is not None else None,
        stats=parse_json(RunStats, stats, "the counters of the run") if stats is not None else None,
        stages=tuple(parse_json(StageStats, stage, "the counters of a stage") for stage in stages if stage is not None),
        epoch=int(epoch or 0),
        serving=int(serving or 0),
        recovers=recovers == b"1",
        recoveries=tuple(parse_json(Recovery, text, "the recovery") for text in recoveries),
        num_recoveries=int(num_recoveries or 0),
    )


def _supervision_of(told: Sequence[Any]) -> Supervision:
    """What ``supervise.lua`` has returned."""
    (failure, state, epoch), alive, expired, doing, suspects, ends, places, recoveries, lost, now_us = told
    return Supervision(
        epoch=None if epoch is None else int(epoch),
        state=state.decode() if state is not None else "gone",
        failure=failure.decode() if failure is not None else None,
        members=tuple(sorted([*alive, *expired])),
        expired=tuple(sorted(expired)),
        activities={rank: _activity(text, int(now_us)) for rank, text in _by_rank(doing).items()},
        suspects=_by_rank(suspects),
        ends=_by_rank(ends),
        places=_by_rank(places),
        recoveries=tuple(parse_json(Recovery, text, "the recovery") for text in recoveries),
        lost_nodes=tuple(sorted(node.decode() for node in lost)),
    )


def _activity(told: str, now_us: int) -> Activity:
    """What ``lease.lua`` has noted."""
    at_us, text = told.split(" ", 1)
    return structs.replace(parse_json(Activity, text, "the rank's activity"), age_seconds=(now_us - int(at_us)) / 1e6)


def _by_rank(pairs: Sequence[bytes]) -> dict[int, str]:
    """A hash of texts by rank, as Redis tells it: fields and values alternate."""
    return {int(rank): text.decode() for rank, text in zip(pairs[::2], pairs[1::2], strict=True)}


def _encode(planned: Sequence[Planned]) -> str:
    return json.dumps([[plan.task.id, [task.id for task in plan.after], json.dumps(plan.payload)] for plan in planned])
