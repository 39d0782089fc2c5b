"""How each kind of fault is brought about. Knows process ids and Redis, not what becomes of the requests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from pipedec.bench.faults.host import ClusterHost
from pipedec.bench.faults.kinds import KINDS, RESET, Fault
from pipedec.bench.serve.server import ServerUnderTest
from pipedec.core import PipedecError
from pipedec.scheduler import ClientScheduler

Strike = Callable[[], None]
_CONNECTED_SECONDS = 10.0


def prepare(fault: Fault, host: ClusterHost, control: ClientScheduler, server: ServerUnderTest | None) -> Strike:
    """Everything that takes time; what is returned brings the fault about at once.

    Args:
        control: a connection that nobody else uses.
        server: in front of the cluster, for the kind ``front-end``.
    """
    commands: Any = control.client
    match fault.kind.name:
        case "kill" | "stop" | "exit":
            assert fault.rank is not None
            return _signalling(host.pids[fault.rank], fault.kind.name)
        case "reset":
            assert fault.rank is not None
            return _resetting(fault.rank, host.pids)
        case "redis-restart":
            return _signalling(commands.info("server")["process_id"], "kill")
        case "redis-flush":
            return lambda: commands.flushall()
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
