"""A node: what ``pipedec launch`` starts on every host of a cluster, and what starts and watches that host's ranks.

It speaks JSON, one object per line: orders come on standard input, news go to standard output; other output of the ranks
goes to standard error. Until the run is up, everything that the node has started ends with standard input, so a launcher that
is killed leaves nothing behind. From then on the node watches its ranks, replaces them and takes over those of other hosts by
itself, and ends with the run: it needs the launcher no longer. Loads no torch to start ranks: they are forked from a server
process that does, and which is all that a spare consists of. ``pipedec doctor`` asks it about its host.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, BinaryIO

from pipedec import __version__
from pipedec.cluster.node_output import relayed_output
from pipedec.cluster.node_rank import LaunchedRun
from pipedec.cluster.processes import RankProcesses, start_fork_server
from pipedec.cluster.versions import installed_version
from pipedec.core import PipedecError, SchedulerLost, UserError
from pipedec.validation import validated

if TYPE_CHECKING:
    from pipedec.cluster.doctor.host import HostDoctor
    from pipedec.cluster.host_watch import HostWatch
    from pipedec.cluster.node_run import NodeRun
    from pipedec.scheduler import EmbeddedServer

PROTOCOL = 3  # of orders and news: to be raised whenever a launcher and a node of different versions would misunderstand
END_SECONDS = 3.0
LINGER_SECONDS = 5.0  # for which clients may still read the end of a run from a Redis that this node has started
TURN_SECONDS = 0.5  # an end of a process is seen at once
LINGER_TURN_SECONDS = 0.1
IDLE_SECONDS = 60.0

Say = Callable[..., None]  # the name of the news, and what it holds


def main() -> None:
    """Entry point: ``python -m pipedec.cluster.node``."""
    stdin, say = _take_standard_streams()
    receiver, sender = Pipe(duplex=False)
    is_on_its_own = threading.Event()
    threading.Thread(target=_read_orders, args=(stdin, sender, is_on_its_own), daemon=True).start()
    with relayed_output():
        Node(receiver, say, is_on_its_own).run()


def _take_standard_streams() -> tuple[BinaryIO, Say]:
    """Keep standard input and output for orders and news: the ranks inherit /dev/null and standard error in their places."""
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
    """Pass orders on to the main thread. When they end, it has some seconds to end the ranks; then the kernel does it.

    Not if the node needs no launcher any longer: then only the order to end ends it.
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


class Node:
    """This host's ranks, and Redis if it is this host's.

    Args:
        orders: one message each; its end is the order to end, unless the node is on its own.
        say: sends news to the launcher.
        is_on_its_own: set by this node when it needs no launcher any longer.
        idle_seconds: a launcher that does not end the node so long after its ranks' end has lost its connection.
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
        self._server: EmbeddedServer | None = None
        self._restart_redis: Callable[[], EmbeddedServer] | None = None
        self._doctor: HostDoctor | None = None

    def run(self) -> None:
        """Follow orders and tell what the ranks report, until there are no more orders."""
        try:
            self._say("hello", **describe_host())
            while self._take_part():
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
                self._linger(self._server)
                self._server.stop()

    def _take_part(self) -> bool:
        """Wait for an order or for a rank; False when there are no more orders, or the ranks have ended long ago."""
        return self._start() if self._watch is None else self._watch_over(self._watch)

    def _watch_over(self, watch: HostWatch) -> bool:
        """A turn of a node whose run is up; False when that has ended."""
        running = self._ranks.pids.keys() - self._ranks.exit_statuses.keys()
        orders = [] if self._orders is None else [self._orders]
        if self._orders in wait([*orders, *self._ranks.waitables(running)], timeout=TURN_SECONDS) and not self._hear():
            return False
        if watch.turn():
            return True
        self._say("over")
        return False

    def _start(self) -> bool:
        """A turn of a node whose run is not up yet."""
        assert self._orders is not None
        idle_seconds = self._idle_seconds if self._ranks.pids and not self._running else None
        if not (ready := wait([self._orders, *self._ranks.waitables(self._running)], timeout=idle_seconds)):
            return False
        if self._orders in ready and not self._hear():
            return False
        for rank, report in self._ranks.read(0.0):
            if report is not None:
                self._say("report", rank=rank, report=report)
        ended = self._ranks.exit_statuses
        for rank in self._running & ended.keys():
            self._running.remove(rank)
            self._say("ended", rank=rank, status=ended[rank])
        return True

    def _hear(self) -> bool:
        """Follow an order; False if there are no more and the launcher is needed."""
        assert self._orders is not None
        try:
            self._follow(json.loads(self._orders.recv_bytes()))
        except EOFError:
            self._orders = None
            return self._is_on_its_own.is_set()
        return True

    def _linger(self, server: EmbeddedServer) -> None:
        """Let clients elsewhere read how a run has ended, until none is connected or the launcher wants an end."""
        deadline = time.monotonic() + (LINGER_SECONDS if self._is_on_its_own.is_set() else 0.0)
        while self._is_on_its_own.is_set() and server.has_clients() and time.monotonic() < deadline:
            time.sleep(LINGER_TURN_SECONDS)

    def _follow(self, order: dict[str, Any]) -> None:
        match order.pop("order"):
            case "prepare":
                os.environ.update(order["environment"])  # before the process from which ranks inherit it
                start_fork_server()
            case "redis":
                self._start_redis(**order)
            case "join":
                self._join(**order)
            case "start":
                self._start_rank(**order)
            case "watch":
                self._begin_watch(**order)
            case "examine":
                self._examine(**order)
            case "reach":
                self._reach(**order)
            case "measure":
                self._measure(**order)

    def _examine(self, questions: dict[str, Any], environment: dict[str, str]) -> None:
        from pipedec.cluster.doctor.facts import Questions
        from pipedec.cluster.doctor.host import HostDoctor

        os.environ.update(environment)  # before torch is loaded
        self._doctor = self._doctor or HostDoctor()
        self._say("examined", report=asdict(self._doctor.examine(validated(Questions, questions))))

    def _reach(self, places: dict[str, tuple[str, int]]) -> None:
        from pipedec.cluster.doctor.host import unreachable

        self._say("reached", unreachable=unreachable(places))

    def _measure(self, address: str, port: int) -> None:
        from pipedec.cluster.doctor.links import measure

        self._say("measured", link=asdict(measure(address, port)))

    def _start_redis(self, port: int | None, password: str, towards: list[str], interface: str | None) -> None:
        from pipedec.scheduler.server import ALL_ADDRESSES, LOOPBACK, EmbeddedServer

        address = own_address(towards, interface)
        bind = ALL_ADDRESSES if address else LOOPBACK
        server = self._server = EmbeddedServer(bind=bind, port=port, password=password)
        self._restart_redis = lambda: EmbeddedServer(bind=bind, port=server.port, password=password)
        self._say("redis", address=address or LOOPBACK, port=self._server.port)

    def _keep_redis(self) -> None:
        """Start Redis again if it has died: where it was, and empty."""
        if self._server is None or self._restart_redis is None or self._server.is_running:
            return
        with suppress(SchedulerLost, UserError):  # reported when it has failed for too long
            self._server = self._restart_redis()

    def _join(self, run: dict[str, Any], host: str) -> None:
        from pipedec.cluster.node_run import NodeRun

        self._run = NodeRun(validated(LaunchedRun, run), host, self._ranks, self._say)
        self._say("joined")

    def _start_rank(self, rank: int) -> None:
        assert self._run is not None
        self._run.start_rank(rank)
        self._running.add(rank)

    def _begin_watch(self, digests: dict[str, dict[str, str]]) -> None:
        assert self._run is not None
        self._run.digests = digests
        self._watch = self._run.watch(self._keep_redis)
        self._watch.turn()  # publishes which ranks are here
        self._is_on_its_own.set()
        self._say("watching")


def describe_host() -> dict[str, Any]:
    """Facts about this host that the launcher compares before it goes on."""
    return {
        "protocol": PROTOCOL, "pipedec": __version__, "torch": installed_version("torch"),
        "python": platform.python_version(), "hostname": socket.gethostname(), "pid": os.getpid(),
    }  # fmt: skip


def own_address(towards: list[str], interface: str | None) -> str | None:
    """The address at which other hosts reach this one; None if the launcher is on this host, and there are no others.

    It is that of the configured interface, else of the route to one of ``towards``, else the one that ssh was given.

    Raises:
        PipedecError: there is no such address.
    """
    from pipedec.cluster.network import interface_address, routed_address

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
