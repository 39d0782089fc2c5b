"""The doctor on this host, for the command and for a node that is asked from elsewhere. Knows no other host but as an address."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from pipedec.cluster.doctor.checks import HostReport, examine
from pipedec.cluster.doctor.facts import Questions, gather
from pipedec.cluster.doctor.links import LinkServer
from pipedec.cluster.network import can_connect

REACH_SECONDS = 3.0


class HostDoctor:
    """Examines this host. Keeps a TCP port open until ``close``, which other hosts connect to and measure."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._listener: socket.socket | None = None

    def examine(self, questions: Questions) -> HostReport:
        """The facts and what they mean. Takes some seconds: torch is loaded."""
        if self._listener is None:
            self._listener = self._open_port()
        facts = gather(questions, self._listener.getsockname()[1] if self._listener else None)
        return HostReport(facts, examine(facts, questions), time.time_ns() // 1000)

    def close(self) -> None:
        self._open.close()

    def _open_port(self) -> socket.socket | None:
        """A socket that listens on a free TCP port of all addresses; None if the system refuses."""
        try:
            listener = socket.create_server(("", 0), backlog=64)
        except OSError:
            return None
        self._open.callback(LinkServer(listener).close)
        return listener


def unreachable(places: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Try to connect to all hosts at once.

    Args:
        places: address and port of each host.

    Returns:
        why a host cannot be connected to, by its name.
    """
    if not places:
        return {}
    with ThreadPoolExecutor(len(places)) as pool:
        reasons = pool.map(lambda place: can_connect(place[0], place[1], REACH_SECONDS), places.values())
        return {name: reason for name, reason in zip(places, reasons, strict=True) if reason is not None}
