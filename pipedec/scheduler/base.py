"""Redis calls that ranks, clients and supervisors share. The rules are in the Lua scripts, the names of keys in ``keys``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import redis
from msgspec import structs
from redis.exceptions import NoScriptError

from pipedec.core.errors import SchedulerLost
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import ActivityReport
from pipedec.scheduler import calls
from pipedec.scheduler.calls import Call
from pipedec.scheduler.client import PATIENCE_SECONDS, lost_run, patiently, server_clock_us, translated_errors
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.protocol import RunStatus
from pipedec.scheduler.scripts import KEY_SECONDS
from pipedec.topology import Topology, of_rank
from pipedec.validation import parse_json

KEPT_RECOVERIES = 20

_T = TypeVar("_T")


class BaseScheduler:
    """The part of the scheduler that ranks, clients and supervisors share. Every call may raise SchedulerLost.

    One object serves one process; several may share a Redis client. The calls of ranks and supervisors carry the epoch in which
    their process takes part. If the run is in another one, those that would change something raise EpochEnded and change nothing.

    Attributes:
        patience_seconds: how long Redis may refuse commands because it is busy or out of memory before a call raises
            SchedulerBusy. Requests are refused at once.
        round_trips: number of commands sent to the server.
    """

    def __init__(self, client: redis.Redis, run_id: str, topology: Topology) -> None:
        self.client = client
        self.keys = Keys(run_id)
        self.topology = topology
        self.patience_seconds = PATIENCE_SECONDS
        self.round_trips = 0
        self._address = _address_of(client)
        self._queues = [self.keys.queue(rank) for rank in topology.ranks]

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self.keys.run_id

    @property
    def epoch(self) -> int:
        """The epoch in which this process takes part."""
        return self.keys.epoch

    def current_epoch(self) -> int | None:
        """The epoch of the run; None if it is not open (yet, or any more)."""
        epoch: Any = self._ask(lambda: self.client.hget(self.keys.run, "epoch"))
        return None if epoch is None else int(epoch)

    def enter(self, epoch: int) -> None:
        """Take part in ``epoch`` from now on."""
        self.keys = Keys(self.run_id, epoch)
        self._queues = [self.keys.queue(rank) for rank in self.topology.ranks]

    def recover(
        self, lost: Sequence[int], reason: str, places: Mapping[int, str] = MappingProxyType({}), counts: bool = True
    ) -> int:
        """End the epoch in which this process takes part, if it is still the run's; returns the run's epoch.

        All ranks get a message of kind ``recover``; requests and their answers stay. The processes of ``lost`` ranks are
        replaced, by the nodes in ``places``. Without ``counts`` no running request can be the cause, and none is charged with an
        attempt. Raises RankLost if the run has failed, SchedulerLost if it is no longer stored.
        """
        keys, ranks = self.keys, self.topology.ranks
        names = [keys.run, keys.members, keys.running, keys.attempts, keys.doing, keys.suspects, keys.ends, keys.places]
        names += [keys.recoveries, keys.bell, keys.waiting, *map(keys.alive, ranks), *self._queues]
        names += [keys.workflow, keys.done, keys.trace, keys.answer(keys.meeting)]
        arguments = [json.dumps(list(lost)), reason, len(ranks), KEPT_RECOVERIES, json.dumps(list(places.items())), int(counts)]
        return int(self._run_script("recover", names, [KEY_SECONDS, self.epoch, *arguments]))

    def abort(self, rank: int, message: str) -> bool:
        """Record that the run failed at ``rank``, and notify every rank and every reader of an answer.

        Only the first failure is recorded: True for it, False for later ones.
        """
        names = [self.keys.run, self.keys.waiting, self.keys.running, self.keys.unread, *self._queues]
        return bool(self._run_script("abort", names, [KEY_SECONDS, of_rank(rank, message), self.keys.answer_prefix, self.epoch]))

    def failure(self) -> str | None:
        """The message of the first abort, or None."""
        text: Any = self._ask(lambda: self.client.hget(self.keys.run, "failure"))
        return text.decode() if text is not None else None

    def lost_run(self) -> SchedulerLost:
        """The error if Redis no longer has the run."""
        return lost_run(self._address)

    def status(self) -> RunStatus:
        """The state of the run, with everything that a waiting client needs, in one round trip."""
        return self.ask(calls.status(self.keys, self.topology))

    def activities(self) -> dict[int, ActivityReport]:
        """The activity of each rank when it last renewed its lease."""
        records: Any = self._ask(lambda: self.client.hgetall(self.keys.doing))
        now_us = self.clock_us()
        return {int(rank): activity_of(text.decode(), now_us) for rank, text in records.items()}

    def clock_us(self) -> int:
        """The scheduler's clock in µs since the epoch, to which ranks on all machines align their traces."""
        return self._ask(lambda: server_clock_us(self.client))

    def clear(self) -> None:
        """Delete all keys of the run."""
        if stored := self._ask(lambda: list(self.client.scan_iter(match=self.keys.prefix + "*", count=1000))):
            self._ask(lambda: self.client.delete(*stored))

    def ask(self, call: Call[_T]) -> _T:
        """Execute a call and return its result."""

        def execute() -> Any:
            try:
                return self.client.execute_command(*call.words)
            except NoScriptError:  # nothing was executed
                return self.client.execute_command(*call.with_source())

        return call.read(self._ask(execute, call.patience_seconds))

    def _run_script(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return self.ask(calls.script(name, keys, arguments, lambda reply: reply))

    def _ask(self, command: Callable[[], _T], patience_seconds: float | None = None) -> _T:
        self.round_trips += 1
        return patiently(command, self._address, self.patience_seconds if patience_seconds is None else patience_seconds)


def read_description(client: redis.Redis, run_id: str) -> RunDescription | None:
    """The description that the ranks have published, for clients; None if there is no such run. Raises UserError if it has
    another version.
    """
    call = calls.description(Keys(run_id))
    with translated_errors(_address_of(client)):
        text = client.execute_command(*call.words)
    return call.read(text)


def activity_of(record: str, now_us: int) -> ActivityReport:
    """Parse what ``lease.lua`` has written to ``doing``. ``now_us`` is Redis's clock."""
    at_us, text = record.split(" ", 1)
    return structs.replace(parse_json(ActivityReport, text, "the rank's activity"), age_seconds=(now_us - int(at_us)) / 1e6)


def _address_of(client: redis.Redis) -> str:
    options = client.connection_pool.connection_kwargs
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
