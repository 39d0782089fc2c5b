"""Calls of Redis as data: what is sent, and how the reply is read. Blocking schedulers and the one for asyncio execute the same.

Knows no connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from pipedec.messages.events import CancelledEvent, Event, event_from_json
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import Recovery, RunStats, StageStats
from pipedec.scheduler.client import BLOCK_SECONDS
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.protocol import WATCH_SECONDS, FrameBatch, RunStatus
from pipedec.scheduler.scripts import KEY_SECONDS, LEASE_MS, script_sha, script_text
from pipedec.topology import Topology
from pipedec.validation import parse_json, to_json

_T = TypeVar("_T")


@dataclass(frozen=True)
class Call(Generic[_T]):
    """A call of Redis, and the meaning of its reply.

    Attributes:
        name: of the script, or of the command.
        words: of the command, which names a script by its hash.
        read: makes the result of the reply.
        patience_seconds: how long to repeat it while Redis refuses it temporarily; None if the caller decides.
    """

    name: str
    words: Sequence[Any]
    read: Callable[[Any], _T]
    patience_seconds: float | None = None

    def with_source(self) -> list[Any]:
        """The words for a server that does not know the script yet."""
        return ["EVAL", script_text(self.name), *self.words[2:]]


Arrived = tuple[int, str, Event]  # an event of an answer, with its request and its position


class Heard(NamedTuple):
    """New events of answers, and the position up to which the wake-ups of the reader are known."""

    events: list[Arrived]
    woken: str


def script(
    name: str, keys: Sequence[str], arguments: Sequence[Any], read: Callable[[Any], _T], patience_seconds: float | None = None
) -> Call[_T]:
    """A call of ``lua/{name}.lua``."""
    return Call(name, ["EVALSHA", script_sha(name), len(keys), *keys, *arguments], read, patience_seconds)


def submit(
    keys: Keys, request_json: str, priority: int = 0, operation: str = "", owner: str = "", lease_ms: int = LEASE_MS
) -> Call[int]:
    """Queue a request; the result is its number. While Redis refuses commands, it is refused at once.

    Args:
        priority: lower ones are taken first, equal ones in the order of their numbers.
        operation: an id that identifies a call that is repeated because its reply was lost. Empty for none.
        owner: whose lease the request needs until its answer is closed, and which is renewed; empty for none.

    Raises, when it is executed:
        QueueFull: as many requests run and wait as the run allows.
        UserError: the run is not up.
        RankLost: the run has failed.
    """
    names = [keys.run, keys.waiting, keys.requests, keys.bell, keys.running, keys.owners, keys.owner(owner)]
    arguments = [KEY_SECONDS, request_json, priority, owner, lease_ms, int(bool(operation))]
    return script("submit", [*names, keys.operation(operation)], arguments, int, patience_seconds=0.0)


def cancel(keys: Keys, request_number: int) -> Call[bool]:
    """End a request: a waiting one at once, a running one when rank 0 reads the cancellation (``Taken``). False if it is unknown
    or has ended.
    """
    names = [keys.waiting, keys.requests, keys.running, keys.cancelled, keys.unread, keys.answer(request_number)]
    return script("cancel", names, [KEY_SECONDS, request_number, to_json(CancelledEvent())], bool)


def close_answer(keys: Keys, request_number: int, operation: str = "") -> Call[None]:
    """Delete an answer; nothing more is written to it. ``operation`` is the id with which its request was submitted."""
    names = [keys.answer(request_number), keys.waiting, keys.running, keys.unread, keys.owners, keys.operation(operation)]
    return script("close", names, [KEY_SECONDS, request_number], _nothing)


def read_answers(keys: Keys, last: Mapping[int, str], seconds: float, owner: str = "", woken: str = "0") -> Call[Heard]:
    """Wait for new events of several answers, at most ``seconds`` and ``BLOCK_SECONDS``. Raises PipedecError for anything but an
    event.

    Args:
        last: by request number, the position of the last event already read; ``"0"`` to start at the beginning.
        owner: whose wake-ups after position ``woken`` end the waiting, too; empty for none.
    """
    wake = {keys.wake(owner): woken} if owner else {}
    streams = {**wake, **{keys.answer(number): position for number, position in last.items()}}
    block = ["BLOCK", max(1, int(1000 * min(seconds, BLOCK_SECONDS)))] if seconds > 0 else []

    def read(reply: Any) -> Heard:
        now = woken
        if wake and reply and reply[0][0].decode() in wake:  # the reply has the order of ``streams``
            now = reply.pop(0)[1][-1][0].decode()
        prefix = len(keys.answer_prefix)
        events = [
            (int(stream[prefix:]), position.decode(), event_from_json(fields[b"event"]))
            for stream, entries in reply
            for position, fields in entries
        ]
        return Heard(events, now)

    return Call("XREAD", ["XREAD", *block, "STREAMS", *streams, *streams.values()], read)


def wake(keys: Keys, owner: str) -> Call[None]:
    """Let ``read_answers`` of the owner in another task return now, or at its next call."""
    return script("wake", [keys.wake(owner)], [LEASE_MS], _nothing)


def take_lease(keys: Keys, owner: str) -> Call[None]:
    """Give the owner a lease, for ``LEASE_MS``."""
    return Call("SET", ["SET", keys.owner(owner), "1", "PX", LEASE_MS], _nothing)


def release(keys: Keys, owner: str) -> Call[None]:
    """Give up the owner's lease, which ends its remaining requests: no client waits for their answers any more."""
    return Call("DEL", ["DEL", keys.owner(owner), keys.wake(owner)], _nothing)


def status(keys: Keys, topology: Topology) -> Call[RunStatus]:
    """The state of the run, with everything that a waiting client needs. Raises UserError if another version has written it."""
    names = [keys.run, keys.running, keys.waiting, keys.members, keys.recoveries, *map(keys.alive, topology.ranks)]
    return script("look", names, [], _status)


def description(keys: Keys) -> Call[RunDescription | None]:
    """The description of the run for clients; None if there is no such run. Raises UserError if it has another version."""

    def read(text: bytes | None) -> RunDescription | None:
        return None if text is None else parse_json(RunDescription, text, "the description of the run")

    return Call("HGET", ["HGET", keys.run, "description"], read)


def begin_watching(keys: Keys) -> Call[None]:
    """For a reader of the live feed without a state: rank 0 publishes all of it, for ``WATCH_SECONDS``."""
    return Call("SET", ["SET", keys.watchers, secrets.token_hex(8), "PX", int(1000 * WATCH_SECONDS)], _nothing)


def go_on_watching(keys: Keys) -> Call[bool]:
    """For a reader of the live feed: rank 0 publishes it for ``WATCH_SECONDS`` more. False if it does not any longer."""
    return Call("PEXPIRE", ["PEXPIRE", keys.watchers, int(1000 * WATCH_SECONDS)], bool)


def live_position(keys: Keys) -> Call[str]:
    """The current end of the live feed: later frames follow this position."""
    return Call(
        "XREVRANGE", ["XREVRANGE", keys.live, "+", "-", "COUNT", 1], lambda newest: newest[0][0].decode() if newest else "0-0"
    )


def read_live(keys: Keys, last: str, seconds: float) -> Call[list[FrameBatch]]:
    """Wait at most ``seconds`` for batches of the live feed that follow the position ``last``."""

    def read(reply: Iterable[Any]) -> list[FrameBatch]:
        return [
            FrameBatch(position.decode(), int(fields[b"number"]), fields[b"frames"].decode())
            for _, entries in reply
            for position, fields in entries
        ]

    return Call("XREAD", ["XREAD", "BLOCK", max(1, int(1000 * seconds)), "STREAMS", keys.live, last], read)


def _nothing(reply: Any) -> None: ...


def _status(looked: Sequence[Any]) -> RunStatus:
    """Read the reply of ``look.lua``."""
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
