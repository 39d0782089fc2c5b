"""Redis calls of a run's ranks (tasks and messages, the queue of requests, answers, leases) and of its supervisors."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import redis

from pipedec.core.limits import SLOW_SECONDS
from pipedec.messages.events import Event
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import ActivityReport, Recovery, RunStats, StageStats
from pipedec.scheduler import calls
from pipedec.scheduler.base import BaseScheduler, activity_of
from pipedec.scheduler.client import BLOCK_SECONDS, DedicatedConnection
from pipedec.scheduler.protocol import (
    SHOWN_BATCHES,
    SHOWN_SECONDS,
    GrantedTask,
    Post,
    RankMessage,
    Supervision,
    Taken,
    published_token_ids,
)
from pipedec.scheduler.scripts import KEY_SECONDS, LEASE_MS, script_sha, script_text
from pipedec.scheduler.workflow import Planned, Task, groups_text
from pipedec.topology import Topology
from pipedec.validation import parse_json, to_json

NODE_LEASE_MS = 3000  # a supervisor's
SLOW_NODE_LEASE_MS = 8000  # on slow links: more than one may be silent, less than ranks wait for one another (``cluster.stalls``)


class RankScheduler(BaseScheduler):
    """The scheduler for a rank; ``renew_lease`` renews its lease for ``lease_ms``.

    It reports tasks under the number of the session of its last message, so that a rank that was suspended cannot finish tasks of
    a later session.
    """

    def __init__(self, client: redis.Redis, run_id: str, topology: Topology) -> None:
        super().__init__(client, run_id, topology)
        self.lease_ms = LEASE_MS
        self._connection = DedicatedConnection(client)
        self._workflow = -1  # its number
        self._knows_finish = False  # the server has the script
        self._num_shown = 0  # batches of the live feed
        self._stats = ""  # this process's, as JSON
        self._entries = "," + ",".join(map(str, topology.entry_ranks)) + ","

    @property
    def server_host(self) -> str | None:
        """The host of the server; None if the connection is a Unix socket."""
        return self.client.connection_pool.connection_kwargs.get("host")

    def enter(self, epoch: int) -> None:
        super().enter(epoch)
        self._workflow = -1

    def open(self, description: RunDescription, duplex: str = "full", recovers: bool = False) -> None:
        """Declare the run up, so that requests are accepted; in a later epoch, that its ranks serve again. Raises UserError if
        the run id is in use, RankLost if the run has failed.

        Args:
            description: for clients; its limits decide when further requests are refused.
            duplex: of the links between the ranks, ``half`` or ``full``; decides the order of transfers that windows grant.
            recovers: whether lost ranks are replaced.
        """
        limits = [description.settings.limits.max_num_seqs, description.settings.limits.max_waiting]
        about = [to_json(description), groups_text(self.topology), duplex, *limits, self.epoch, int(recovers)]
        self._run_script("open", [self.keys.run, self.keys.recoveries, *self._queues], [KEY_SECONDS, *about])

    def journal(self) -> list[RankMessage]:
        """For rank 0, at the beginning of an epoch: all running requests, in the order of their numbers."""
        pipe = self.client.pipeline(transaction=True)
        pipe.smembers(self.keys.running)
        pipe.hgetall(self.keys.requests)
        pipe.hgetall(self.keys.attempts)
        running, requests, attempts = self._ask(lambda: pipe.execute())
        found = []
        for number in sorted(map(int, running)):
            field = str(number).encode()
            text, count = requests[field].decode(), int(attempts.get(field, 0))
            losses = attempts.get(b"losses:" + field, b"").count(b",") + (b"losses:" + field in attempts)
            published = self.ask(calls.read_answers(self.keys, {number: "0"}, 0)).events
            token_ids = published_token_ids(event for _, _, event in published)
            found.append(RankMessage("request", number, text=text, output_token_ids=token_ids, attempts=count, losses=losses))
        return found

    def try_alone(self, number: int | None, passed: int | None = None) -> None:
        """For rank 0: note that it serves request ``number`` alone from now on, or all if it is None; ``passed`` was tried before
        and is not suspected any more.
        """
        given = ["" if one is None else one for one in (number, passed)]
        self._run_script("try", [self.keys.run, self.keys.attempts], [*given, self.epoch])

    def blame(self, number: int) -> None:
        """For rank 0: charge the losses during which a request was running to it, so that supervisors do not count them."""
        self._run_script("blame", [self.keys.run, self.keys.attempts, self.keys.recoveries], [number, self.epoch])

    def begin_session(self, session: int, planned: Sequence[Planned], trace_lines: int) -> None:
        """Start the workflow of a session with its initial tasks, which are independent of the requests in it.

        Its number is unique in the run; ``trace_lines`` of its trace are kept. Raises UserError if another workflow is running or
        the run is not up, RankLost if it has failed.
        """
        arguments = [KEY_SECONDS, session, self._entries, trace_lines, _encode(planned), self.epoch]
        self._run_script("begin", self._graph_keys(), arguments)
        self._workflow = session

    def report(
        self, rank: int, done: Sequence[Task], planned: Sequence[Planned], timeout_seconds: float = 0.0,
        trace_lines: int | None = None,
    ) -> RankMessage | None:  # fmt: skip
        """Report tasks done and schedule ``planned``, in one atomic step; then ``wait``, in the same round trip.

        A transfer is reported by its receiver only (Algorithm 3). A repeated report changes nothing. ``trace_lines`` of the trace
        are kept from now on; None for as many as before.
        """
        keys, ids = self._graph_keys(), json.dumps([task.id for task in done])
        about = [KEY_SECONDS, self._workflow, ids, _encode(planned), self.epoch, "" if trace_lines is None else trace_lines]
        commands: list[list[Any]] = [["EVALSHA", script_sha("finish"), len(keys), *keys, *about]]
        if timeout_seconds > 0:
            commands.append(["BLPOP", self._queues[rank], min(timeout_seconds, BLOCK_SECONDS)])
        *_, reply = self._ask(partial(self._exchange, commands))
        return self._message(reply[1]) if timeout_seconds > 0 and reply is not None else None

    def _exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        if not self._knows_finish:  # a server without the script would let the other command wait
            self._connection.call("SCRIPT", "LOAD", script_text("finish"))
            self._knows_finish = True
        try:
            return self._connection.call_all(commands)
        except redis.exceptions.NoScriptError:  # nothing was executed
            self._knows_finish = False
            return self._exchange(commands)

    def wait(self, rank: int, timeout_seconds: float) -> RankMessage | None:
        """The rank's next message, or None if none arrives within ``timeout_seconds``."""
        if timeout_seconds <= 0:
            return self._lpop(self._queues[rank])
        deadline = time.monotonic() + timeout_seconds
        while (remaining := deadline - time.monotonic()) > 0:
            if (reply := self._blpop([self._queues[rank]], remaining)) is not None:
                return self._message(reply[1])
        return None

    def wait_request(self, timeout_seconds: float) -> RankMessage | None:
        """For rank 0 when nothing runs: the next ``request``, ``stop`` or ``abort``, or None after ``timeout_seconds``. Raises
        RankLost if the run has failed.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            if (message := self._lpop(self._queues[0])) is not None:
                return message
            if requests := self.pop_requests(1).requests:
                return requests[0]
            if (remaining := deadline - time.monotonic()) <= 0:
                return None
            reply = self._blpop([self._queues[0], self.keys.bell], remaining)
            if reply is not None and reply[0].decode() == self._queues[0]:
                return self._message(reply[1])

    def pop_requests(self, limit: int) -> Taken:
        """For rank 0, without waiting: at most ``limit`` requests, in the order of (priority, number), and all cancellations.
        Raises RankLost if the run has failed.
        """
        keys = self.keys
        names = [keys.run, keys.waiting, keys.requests, keys.running, keys.cancelled, keys.bell, keys.watchers]
        state, cancelled, watcher, *taken = self._run_script("take", names, [KEY_SECONDS, limit, self.epoch])
        requests = [
            RankMessage("request", int(number), text=text.decode()) for number, text in zip(taken[::2], taken[1::2], strict=True)
        ]
        return Taken(requests, sorted(map(int, cancelled)), state == b"stopping", watcher.decode())

    def end_orphans(self) -> list[int]:
        """For rank 0: cancel the requests of owners without a lease, and close their answers. Returns the numbers."""
        keys = self.keys
        names = [keys.owners, keys.waiting, keys.requests, keys.running, keys.cancelled, keys.unread, keys.run]
        return sorted(self._run_script("orphans", names, [KEY_SECONDS, keys.owner_prefix, keys.answer_prefix, self.epoch]))

    def publish(self, request_number: int, *events: Event) -> None:
        """Append events to the answer of a request."""
        self.publish_all([Post(request_number, events)])

    def publish_all(self, posts: Sequence[Post], stats: RunStats | None = None) -> None:
        """Append events to the answers of several requests, in order, in one atomic step; new ``stats`` are for ``status``."""
        keys = self.keys
        names = [keys.running, keys.cancelled, keys.unread, keys.run, keys.requests, keys.attempts]
        names += (keys.answer(post.number) for post in posts)
        texts = [[post.number, int(post.ends), *map(to_json, post.events)] for post in posts]
        self._run_script("publish", names, [KEY_SECONDS, json.dumps(texts), "" if stats is None else to_json(stats), self.epoch])

    def show(self, frames: Sequence[str]) -> None:
        """For rank 0: add frames, each a JSON object, to the live feed. Only the latest batches are kept, for a short time."""
        self._num_shown += 1
        pipe = self.client.pipeline(transaction=True)
        pipe.xadd(self.keys.live, {"number": self._num_shown, "frames": f"[{','.join(frames)}]"}, maxlen=SHOWN_BATCHES)
        pipe.pexpire(self.keys.live, int(1000 * SHOWN_SECONDS))
        self._ask(pipe.execute)

    def publish_stats(self, stats: StageStats) -> None:
        """Publish a stage's counters for ``status`` when its lease is renewed next. Sends nothing itself."""
        self._stats = to_json(stats)

    def renew_lease(self, rank: int, activity: ActivityReport | None = None, epoch: int | None = None) -> None:
        """Renew the lease of ``rank`` and the time to live of the run's keys; report its activity to the supervisors. With
        ``epoch``, in that one, which the process has yet to enter.
        """
        keys = self.keys
        names = [keys.members, keys.alive(rank), keys.running, keys.run, keys.doing, *self._lasting_keys()]
        doing = "" if activity is None else to_json(activity)
        about = [KEY_SECONDS, self.lease_ms, rank, keys.answer_prefix, self._stats, doing, self.epoch if epoch is None else epoch]
        self._run_script("lease", names, about)

    def expired_ranks(self) -> list[int]:
        """Ranks whose lease has expired."""
        alive = [self.keys.alive(rank) for rank in self.topology.ranks]
        return sorted(self._run_script("expired", [self.keys.members, *alive], []))

    def leave(self, rank: int) -> None:
        """Give up the lease of a rank that exits normally."""
        self._run_script("leave", [self.keys.members, self.keys.alive(rank), self.keys.run], [rank, self.epoch])

    def suspect(self, rank: int, message: str) -> None:
        """Report to the supervisors that ``rank`` cannot continue, because another one does not answer."""
        self._run_script("note", [self.keys.run, self.keys.suspects], [KEY_SECONDS, rank, message, self.epoch])

    def note_end(self, rank: int, message: str) -> None:
        """Report to the supervisors why the process of ``rank`` ends."""
        self._run_script("note", [self.keys.run, self.keys.ends], [KEY_SECONDS, rank, message, self.epoch])

    def trace(self) -> list[GrantedTask]:
        """The trace of the latest session, as far as it is kept."""
        lines: Any = self._ask(lambda: self.client.lrange(self.keys.trace, 0, -1))
        fields = (line.decode().split(" ") for line in lines)
        return [GrantedTask(Task.parse(task), int(granted), int(finished)) for task, granted, finished in fields]

    def _lasting_keys(self) -> list[str]:
        """The keys that every rank keeps alive, besides those of ``lease.lua``."""
        keys = self.keys
        graph = [keys.workflow, keys.done, keys.trace]
        queue = [keys.waiting, keys.requests, keys.bell, keys.cancelled, keys.unread, keys.owners, keys.attempts]
        reports = [keys.suspects, keys.ends, keys.places, keys.recoveries, keys.nodes]
        return [keys.answer(keys.meeting), *graph, *queue, *reports, *self._queues]

    def _graph_keys(self) -> list[str]:
        keys = self.keys
        return [keys.workflow, keys.done, keys.trace, keys.run, *self._queues]

    def _blpop(self, queues: list[str], timeout_seconds: float) -> Any:
        """[queue, element] of the first of ``queues`` that has one; None after ``timeout_seconds``, at most ``BLOCK_SECONDS``, so
        that a server that died silently is noticed.
        """
        return self._ask(lambda: self._connection.call("BLPOP", *queues, max(0.001, min(timeout_seconds, BLOCK_SECONDS))))

    def _lpop(self, queue: str) -> RankMessage | None:
        line: Any = self._ask(lambda: self.client.lpop(queue))
        return self._message(line)

    def _message(self, line: bytes | None) -> RankMessage | None:
        if line is None:
            return None
        message = RankMessage.from_json(line)
        if message.kind == "tasks":
            self._workflow = message.number
        return message


def _encode(planned: Sequence[Planned]) -> str:
    return json.dumps([[plan.task.id, [task.id for task in plan.after], json.dumps(plan.payload)] for plan in planned])


class SupervisorScheduler(BaseScheduler):
    """The scheduler for a supervisor, which claims the name of a run, and starts and replaces its ranks."""

    _lease_ms = NODE_LEASE_MS

    def supervise(self, node: str, ranks: Sequence[int] = ()) -> Supervision:
        """For the supervisor ``node`` of a host, in one round trip: the state for its decisions. Renews its lease, and registers
        the ``ranks`` that run on this host as its own, unless another host has them.
        """
        keys = self.keys
        names = [keys.run, keys.members, keys.doing, keys.suspects, keys.ends, keys.places]
        names += [keys.recoveries, keys.nodes, keys.node(node), *map(keys.alive, self.topology.ranks)]
        about = [KEY_SECONDS, node, self._lease_ms, keys.node_prefix, json.dumps(list(ranks))]
        reply = self._run_script("supervise", names, about)
        (failure, state, epoch, tried), alive, expired, doing, suspects, ends, places, recoveries, lost, now_us = reply
        activities = {rank: activity_of(text, int(now_us)) for rank, text in _by_rank(doing).items()}
        is_slow = sum(one.link_seconds for one in activities.values()) > SLOW_SECONDS
        self._lease_ms = SLOW_NODE_LEASE_MS if is_slow else NODE_LEASE_MS
        return Supervision(
            epoch=None if epoch is None else int(epoch),
            state=state.decode() if state is not None else "gone",
            failure=failure.decode() if failure is not None else None,
            members=tuple(sorted([*alive, *expired])),
            expired=tuple(sorted(expired)),
            activities=activities,
            suspects=_by_rank(suspects),
            ends=_by_rank(ends),
            places=_by_rank(places),
            recoveries=tuple(parse_json(Recovery, text, "the recovery") for text in recoveries),
            tried=None if tried is None else int(tried),
            lost_nodes=tuple(sorted(node.decode() for node in lost)),
        )

    def members(self) -> list[int]:
        """Ranks that have taken a lease and have not left, including expired ones and ranks beyond the topology."""
        ranks: Any = self._ask(lambda: self.client.smembers(self.keys.members))
        return sorted(int(rank) for rank in ranks)


def _by_rank(pairs: Sequence[bytes]) -> dict[int, str]:
    """A hash of texts by rank, as Redis returns it: fields and values alternate."""
    return {int(rank): text.decode() for rank, text in zip(pairs[::2], pairs[1::2], strict=True)}
