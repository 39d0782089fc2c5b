"""A node: what ``pipedec launch`` starts on every host of a cluster, and what starts and watches that host's ranks.

It speaks JSON, one object per line: orders come on standard input, news go to standard output; other output of the ranks
goes to standard error. Until the run is up, everything that the node has started ends with standard input, so a launcher that
is killed leaves nothing behind. From then on the node watches its ranks, replaces them and takes over those of other hosts
without the launcher, and ends with the run. Loads no torch: ranks are forked from a server process that does, which is all
that a spare consists of. ``pipedec doctor`` examines hosts through nodes, too.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import to_builtins

from pipedec import __version__
from pipedec.cluster.network import installed_version, interface_address, routed_address
from pipedec.cluster.processes import RankProcesses, start_fork_server
from pipedec.config import state_directory
from pipedec.core.errors import PipedecError, UserError
from pipedec.validation import validated

if TYPE_CHECKING:
    from pipedec.cluster.doctor.host import HostDoctor
    from pipedec.cluster.host_watch import HostWatch
    from pipedec.cluster.node_run import NodeRun
    from pipedec.scheduler import EmbeddedRedis

PROTOCOL = 5  # version of orders and news; to be raised when launchers and nodes of two versions would misunderstand each other
END_SECONDS = 3.0
LINGER_SECONDS = 5.0  # for clients to read the end of a run from a Redis that this node has started
TURN_SECONDS = 0.5  # between two turns, unless a process ends
LINGER_TURN_SECONDS = 0.1
IDLE_SECONDS = 60.0
LOG_NAME = "node.log"
MOST_LOG_BYTES = 20_000_000
DRAIN_SECONDS = 0.5

Say = Callable[..., None]  # sends news: their name, and their contents by keyword


def main() -> None:
    """Entry point: ``python -m pipedec.cluster.node``."""
    stdin, say = take_standard_streams()
    receiver, sender = Pipe(duplex=False)
    is_on_its_own = threading.Event()
    threading.Thread(target=_read_orders, args=(stdin, sender, is_on_its_own), daemon=True).start()
    with relayed_output():
        Node(receiver, say, is_on_its_own).run()


def take_standard_streams() -> tuple[BinaryIO, Say]:
    """Keep standard input and output for orders and news; ranks inherit /dev/null and standard error in their places."""
    stdin, stdout = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def say(news: str, **contents: Any) -> None:
        try:
            print(json.dumps({"news": news} | contents), file=stdout, flush=True)
        except BrokenPipeError:
            return  # the launcher is gone: standard input has ended, too

    return stdin, say


def _read_orders(stdin: BinaryIO, orders: Connection, is_on_its_own: threading.Event) -> None:
    """Pass orders on to the main thread. When they end, it has ``END_SECONDS`` to end the ranks; then this process exits, and the
    kernel ends them. A node that is on its own ends only by the order ``end``.
    """
    for line in stdin:
        if json.loads(line)["order"] == "end":
            is_on_its_own.clear()
            break
        orders.send_bytes(line)
    orders.close()
    time.sleep(END_SECONDS)
    if not is_on_its_own.is_set():
        os._exit(1)


@contextmanager
def relayed_output() -> Iterator[None]:
    """Relay standard output and error of this process, and of those that it starts, to the launcher as long as that reads, and
    afterwards to a log file on the host.
    """
    usual = os.dup(2)
    receiver, sender = os.pipe()
    os.set_inheritable(sender, True)
    for descriptor in (1, 2):
        os.dup2(sender, descriptor)
    os.close(sender)

    def relay() -> None:
        log: int | None = None
        written = 0
        while text := os.read(receiver, 65536):
            if log is None:
                try:
                    os.write(usual, text)
                    continue
                except OSError:  # the launcher reads no longer
                    log = os.open(state_directory() / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            if written < MOST_LOG_BYTES:
                written += len(text)
                with suppress(OSError):  # the disk is full: the run goes on
                    os.write(log, text)

    thread = threading.Thread(target=relay, name="output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for descriptor in (1, 2):
            os.dup2(usual, descriptor)
        thread.join(DRAIN_SECONDS)  # it ends when no process holds the other end


class Node:
    """This host's ranks, and Redis if it is this host's.

    Args:
        orders: one message each; end of file is the order to end, unless the node is on its own.
        say: sends news to the launcher.
        is_on_its_own: set by this node when it needs no launcher any longer.
        idle_seconds: after the end of its ranks; a launcher that has not ended the node by then has lost its connection.
    """

    def __init__(self, orders: Connection, say: Say, is_on_its_own: threading.Event, idle_seconds: float = IDLE_SECONDS) -> None:
        self._orders: Connection | None = orders
        self._say = say
        self._is_on_its_own = is_on_its_own
        self._idle_seconds = idle_seconds
        self._ranks = RankProcesses()
        self._running: set[int] = set()
        self._run: NodeRun | None = None
        self._watch: HostWatch | None = None
        self._server: EmbeddedRedis | None = None
        self._doctor: HostDoctor | None = None

    def run(self) -> None:
        """Follow orders and pass on the ranks' reports; once the run is up, watch the ranks until it ends."""
        try:
            self._say(
                "hello", protocol=PROTOCOL, pipedec=__version__, torch=installed_version("torch"),
                python=platform.python_version(), hostname=socket.gethostname(), pid=os.getpid(),
            )  # fmt: skip
            while self._turn_before_up() if self._watch is None else self._turn_while_up(self._watch):
                continue
        except PipedecError as error:
            self._say("failed", message=str(error), is_mistake=isinstance(error, UserError))
        except Exception as error:
            self._say("failed", message=f"internal error of the node: {type(error).__name__}: {error}")
        finally:
            self._ranks.kill()
            if self._run is not None:
                self._run.close()
            if self._server is not None:
                deadline = time.monotonic() + LINGER_SECONDS  # for clients elsewhere, unless the launcher wants an end
                while self._is_on_its_own.is_set() and self._server.has_clients() and time.monotonic() < deadline:
                    time.sleep(LINGER_TURN_SECONDS)
                self._server.stop()

    def _turn_while_up(self, watch: HostWatch) -> bool:
        """A turn of a node whose run is up; False when that has ended."""
        orders = [] if self._orders is None else [self._orders]
        ready = wait([*orders, *self._ranks.waitables(self._ranks.alive)], timeout=TURN_SECONDS)
        if self._orders in ready and not self._follow_next():
            return False
        if watch.turn():
            return True
        self._say("over")
        return False

    def _turn_before_up(self) -> bool:
        """A turn of a node whose run is not up yet; False when there are no more orders, or the ranks have ended long ago."""
        assert self._orders is not None
        idle_seconds = self._idle_seconds if self._ranks.pids and not self._running else None
        if not (ready := wait([self._orders, *self._ranks.waitables(self._running)], timeout=idle_seconds)):
            return False
        if self._orders in ready and not self._follow_next():
            return False
        for rank, report in self._ranks.read(0.0):
            if report is not None:
                self._say("report", rank=rank, report=report)
        ended = self._ranks.exit_statuses
        for rank in self._running & ended.keys():
            self._running.remove(rank)
            self._say("ended", rank=rank, status=ended[rank])
        return True

    def _follow_next(self) -> bool:
        """Follow the next order; False if there are no more and the node is not on its own."""
        assert self._orders is not None
        try:
            self._follow(json.loads(self._orders.recv_bytes()))
        except EOFError:
            self._orders = None
            return self._is_on_its_own.is_set()
        return True

    def _follow(self, order: dict[str, Any]) -> None:
        match order.pop("order"):
            case "prepare":
                os.environ.update(order["environment"])  # before the process from which ranks inherit it
                start_fork_server()
            case "redis":
                from pipedec.scheduler.redis_process import ALL_ADDRESSES, LOOPBACK, EmbeddedRedis

                address = own_address(order["towards"], order["interface"])
                bind = ALL_ADDRESSES if address else LOOPBACK
                self._server = EmbeddedRedis(bind=bind, port=order["port"], password=order["password"])
                self._say("redis", address=address or LOOPBACK, port=self._server.port)
            case "fetch":
                from pipedec.cluster.node_run import LaunchedRun, fetch_parts

                fetch_parts(validated(LaunchedRun, order["run"]), order["host"], self._say)
                self._say("fetched")
            case "join":
                from pipedec.cluster.node_run import LaunchedRun, NodeRun

                self._run = NodeRun(validated(LaunchedRun, order["run"]), order["host"], self._ranks, self._say)
                self._say("joined")
            case "start":
                assert self._run is not None
                self._run.start_rank(order["rank"])
                self._running.add(order["rank"])
            case "watch":
                assert self._run is not None
                self._run.digests = order["digests"]
                self._watch = self._run.watch(self._server.keep if self._server is not None else None)
                self._watch.turn()  # publishes which ranks are here
                self._is_on_its_own.set()
                self._say("watching")
            case "examine":
                os.environ.update(order.get("environment", {}))  # before torch is loaded
                from pipedec.cluster.doctor.host import HostDoctor, Questions

                self._doctor = self._doctor or HostDoctor()
                self._say("examined", report=asdict(self._doctor.examine(validated(Questions, order["questions"]))))
            case "reach":
                from pipedec.cluster.doctor.host import unreachable

                self._say("reached", unreachable=unreachable(order["places"]))
            case "measure":
                assert self._doctor is not None
                self._say("measured", link=to_builtins(self._doctor.measure(**order)))
            case "try pair":
                assert self._doctor is not None
                self._say("tried", reason=self._doctor.try_pair(**order))


def own_address(towards: list[str], interface: str | None) -> str | None:
    """The address at which other hosts reach this one: of the configured interface, else of the route to one of ``towards``, else
    the one to which ssh connected; None if the launcher is on this host, and there are no others. Raises PipedecError if there is
    no such interface or route.
    """
    if interface is not None:
        if (address := interface_address(interface)) is None:
            raise PipedecError(f"there is no interface {interface} with an address: correct interface: in the file")
        return address
    connection = os.environ.get("SSH_CONNECTION", "").split()  # client, its port, server, its port
    routes = [address for name in towards if (address := routed_address(name)) and not address.startswith(("127.", "::1"))]
    if routes or connection:
        return routes[0] if routes else connection[2]
    if towards:
        raise PipedecError(f"no route leads to {' or '.join(towards)}: give this host an interface: in the file")
    return None


if __name__ == "__main__":
    main()
