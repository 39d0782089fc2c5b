"""The kinds of faults: which one comes next, a pure function of a seed, and how each is brought about."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psutil

from benchmarks.output import check_known
from pipedec.core.errors import PipedecError
from pipedec.scheduler import ClientScheduler
from soak.faults.host import ClusterHost, FrontEnd

RESET = "reset"
_Card = TypeVar("_Card")


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    help: str
    hits_rank: bool = False  # one rank is hit; ``loses_rank``: its process is lost, and replaced in a new epoch
    loses_rank: bool = False
    may_lose_rank: bool = False  # now and then gloo hangs in it, or ends it (``ProcessGroups.abort``)
    ends_all: bool = False  # nothing of the cluster is left


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", "a rank is killed", hits_rank=True, loses_rank=True),
        Kind("stop", "a rank is stopped and never goes on", hits_rank=True, loses_rank=True),
        Kind("exit", "a rank ends with exit status 0", hits_rank=True, loses_rank=True),
        Kind(RESET, "a connection between two ranks is reset", hits_rank=True, may_lose_rank=True),
        Kind("redis-restart", "Redis is killed, and started again with its data"),
        Kind("redis-disconnect", "Redis closes every connection"),
        Kind("front-end", "a server in front of the cluster is killed with its streams"),
        Kind("supervisor", "the process that started the cluster is killed", ends_all=True),
    )
}


@dataclass(frozen=True)
class Fault:
    """One fault: what, when, under which load."""

    index: int  # from 0
    kind: Kind
    rank: int | None  # that is hit; None if the fault hits none
    questions: tuple[int, ...]  # indices of the questions that are asked together
    watched: int  # index among them of the one that decides when the fault comes
    progress: float  # the part of the watched answer that has come by then, in [0, 1)


def plan_fault(
    index: int, seed: int, kinds: Sequence[str], concurrency: Sequence[int], num_questions: int, num_stages: int
) -> Fault:
    """The fault ``index`` of a seed. Kinds, ranks and numbers of requests come equally often, each in a random order.

    Raises UserError if there is no such kind.
    """
    for name in kinds:
        check_known("kind of fault", name, KINDS)
    draw = random.Random(f"{seed} {index}")
    kind = KINDS[_dealt(f"{seed} kind", kinds, index)]
    role = _dealt(f"{seed} role", (0, 1, (num_stages + 1) // 2, num_stages), index // len(kinds))
    count = _dealt(f"{seed} count", concurrency, index)
    asked = tuple(draw.sample(range(num_questions), min(count, num_questions)))
    rank = role if kind.hits_rank else None
    return Fault(index, kind, rank, asked, draw.randrange(len(asked)), draw.random())


def _dealt(name: str, cards: Sequence[_Card], index: int) -> _Card:
    """The card at ``index`` of an endless row of shuffled decks."""
    turn, place = divmod(index, len(cards))
    return random.Random(f"{name} {turn}").sample(cards, len(cards))[place]


Strike = Callable[[], None]
_CONNECTED_SECONDS = 10.0


def prepare(fault: Fault, host: ClusterHost, control: ClientScheduler, server: FrontEnd | None) -> Strike:
    """Everything that takes time; what is returned brings the fault about at once. ``server`` is for the kind ``front-end``."""
    commands: Any = control.client
    rank = -1 if fault.rank is None else fault.rank
    match fault.kind.name:
        case "kill" | "stop" | "exit":
            return _signalling(host.pids[rank], fault.kind.name)
        case "reset":
            return _resetting(rank, host.pids)
        case "redis-restart":
            return _signalling(commands.info("server")["process_id"], "kill")
        case "redis-disconnect":
            return lambda: commands.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        case "front-end":
            assert server is not None
            return server.kill
        case _:
            return host.supervisor.kill


def _signalling(pid: int, what: str) -> Strike:
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGUSR1}[what]
    process = psutil.Process(pid)
    os.kill(process.pid, 0)
    return lambda: process.send_signal(number)


def possible_kinds() -> tuple[str, ...]:
    """The kinds of faults that can be brought about here: to reset connections takes root, iproute2 and a kernel that does it."""
    return tuple(name for name in KINDS if name != RESET or _can_reset())


def _resetting(rank: int, pids: Mapping[int, int]) -> Strike:
    """Resets a connection of ``rank`` with another rank. There may be none while ranks meet after the last fault."""
    deadline = time.monotonic() + _CONNECTED_SECONDS
    while (found := _connection(rank, pids)) is None:
        if time.monotonic() > deadline:
            raise PipedecError(f"rank {rank} has had no connection with another rank for {_CONNECTED_SECONDS:.0f} s")
        time.sleep(0.05)
    return partial(_reset, *found)


def _connection(rank: int, pids: Mapping[int, int]) -> tuple[int, int] | None:
    """The ports of a connection of ``rank`` with another rank."""
    others = {
        connection.laddr.port
        for other, pid in pids.items()
        if other != rank
        for connection in psutil.Process(pid).net_connections("tcp")
    }
    for connection in psutil.Process(pids[rank]).net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port in others:
            return connection.laddr.port, connection.raddr.port
    return None


def _reset(port: int, peer_port: int) -> None:
    between = ["sport", "=", f":{port}", "and", "dport", "=", f":{peer_port}"]
    subprocess.run(["ss", "--kill", "--tcp", "--numeric", *between], stdout=subprocess.DEVNULL, check=False)


def _can_reset() -> bool:
    """Whether a connection of our own can be reset."""
    if shutil.which("ss") is None or os.geteuid() != 0:
        return False
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        _reset(ours.getsockname()[1], server.getsockname()[1])
        with suppress(OSError):
            ours.sendall(b"?")
            return False
    return True
