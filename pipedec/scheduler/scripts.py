"""The Lua scripts: their sources with the shared files that they use, and the calls and replies that several schedulers share.

Knows no connection.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pipedec.messages.events import CancelledEvent, Event, event_from_json
from pipedec.messages.stats import Recovery, RunStats, StageStats
from pipedec.scheduler.keys import Keys
from pipedec.scheduler.protocol import FrameBatch, RunStatus
from pipedec.topology import Topology
from pipedec.validation import parse_json, to_json

_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel the scripts are inside the package, in a checkout next to it.
_DIRECTORY = _PACKAGE / "lua" if (_PACKAGE / "lua").is_dir() else _PACKAGE.parent / "lua"
KEY_SECONDS = 60  # time to live of the run's keys, renewed with every lease
LEASE_MS = 5000


@cache
def script_text(name: str) -> str:
    """The source of ``lua/{name}.lua``, after that of the files that its first line names (``-- uses: ONE OTHER``), if any.

    Raises:
        FileNotFoundError: the installation lacks the script.
    """
    text = (_DIRECTORY / f"{name}.lua").read_text(encoding="utf-8")
    uses = re.match(r"-- uses: ([\w ]+)\n", text)
    shared = [(_DIRECTORY / f"{other}.lua").read_text(encoding="utf-8") for other in uses[1].split()] if uses else []
    return "\n".join([*shared, text])


@cache
def script_sha(name: str) -> str:
    """The hash by which a server knows the script after its first execution."""
    return hashlib.sha1(script_text(name).encode()).hexdigest()


@cache
def scripts_digest() -> str:
    """Identifies the protocol in Redis of this installation: SHA-256 of all scripts (12 hex digits)."""
    sources = [path.read_bytes() for path in sorted(_DIRECTORY.glob("*.lua"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:12]


class Call(NamedTuple):
    """A call of ``lua/{script}.lua``."""

    script: str
    keys: list[str]
    arguments: list[Any]


def submit_call(keys: Keys, request_json: str, priority: int, operation: str, owner: str = "", lease_ms: int = LEASE_MS) -> Call:
    """Also renews the lease of ``owner`` (empty for none), which the request needs until its answer is closed."""
    names = [keys.run, keys.waiting, keys.requests, keys.bell, keys.running, keys.owners, keys.owner(owner)]
    names.append(keys.operation(operation))
    return Call("submit", names, [KEY_SECONDS, request_json, priority, owner, lease_ms, int(bool(operation))])


def cancel_call(keys: Keys, request_number: int) -> Call:
    names = [keys.waiting, keys.requests, keys.running, keys.cancelled, keys.unread, keys.answer(request_number)]
    return Call("cancel", names, [KEY_SECONDS, request_number, to_json(CancelledEvent())])


def close_call(keys: Keys, request_number: int, operation: str = "") -> Call:
    names = [keys.answer(request_number), keys.waiting, keys.running, keys.unread, keys.owners, keys.operation(operation)]
    return Call("close", names, [KEY_SECONDS, request_number])


def look_call(keys: Keys, topology: Topology) -> Call:
    return Call(
        "look", [keys.run, keys.running, keys.waiting, keys.members, keys.recoveries, *map(keys.alive, topology.ranks)], []
    )


def status_of(looked: Sequence[Any]) -> RunStatus:
    """Read the reply of ``look.lua``. Raises UserError if another version has written the counters."""
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


def shown_of(reply: Iterable[Any]) -> list[FrameBatch]:
    """Read the reply of ``XREAD`` from the live feed."""
    return [
        FrameBatch(position.decode(), int(fields[b"number"]), fields[b"frames"].decode())
        for _, entries in reply
        for position, fields in entries
    ]


def events_read(keys: Keys, reply: Iterable[Any]) -> list[tuple[int, str, Event]]:
    """Read the reply of ``XREAD`` from answers: events with request and position. Raises PipedecError if one is not an event."""
    prefix = len(keys.answer_prefix)
    return [
        (int(stream[prefix:]), position.decode(), event_from_json(fields[b"event"]))
        for stream, entries in reply
        for position, fields in entries
    ]
