"""The speed of the network between two hosts, measured by plain TCP (one host serves, the other one measures), and its finding.

The client sends a head, then messages that the server sends back, then as much as it can for some time; the server answers with
the number of bytes that have arrived and the nanoseconds that this took. Neither counts while TCP starts slowly. Everything has a
deadline.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from pipedec.cluster.doctor.facts import NetworkFacts
from pipedec.cluster.doctor.findings import Finding, note, ok
from pipedec.core.errors import PipedecError
from pipedec.hardware import LinkSpec

ROUND_TRIPS = 100  # at most
TIMING_SECONDS = 1.0  # after which no further round trip begins
SEND_SECONDS = 1.0  # that count
START_ROUND_TRIPS = 10  # before: until TCP uses all of a long link
STREAMS = 4  # a single connection may be limited by a processor before the network is
SESSION_SECONDS = 15.0  # for a whole measurement, both sides
MESSAGE_BYTES = 64
SLOWEST_SHARE = 0.8  # of the configured bandwidth; headers and pauses take the rest
SLOWEST_TIMES = 2.0  # the configured latency, plus
SPARE_US = 100.0  # for the interpreter on a busy host
LONG_US = 2000.0  # from this latency on a link is no longer within a site
_HEAD = struct.Struct("!8sIQ")  # the number of messages, and the nanoseconds of what follows that do not count
_RESULT = struct.Struct("!QQ")  # bytes, nanoseconds
_MAGIC = b"pdlinks2"
_CHUNK = bytes(1 << 18)
_IN_FILE = "in the file, or in its links: for this pair of hosts, so that the plan is right"


@dataclass(frozen=True)
class MeasuredLink:
    """Either ``error``, or the rate in Gbit/s and the latency of one way in microseconds, half the median round trip."""

    gbps: float = 0.0
    latency_us: float = 0.0
    error: str | None = None


class LinkServer:
    """Answers measurements on a listening socket, in threads of its own, until the socket is closed."""

    def __init__(self, listener: socket.socket) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; measurements that have begun continue."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def measure(address: str, port: int) -> MeasuredLink:
    """Measure the link to the ``LinkServer`` at this address. Takes some seconds, at most ``SESSION_SECONDS``."""
    deadline = time.monotonic() + SESSION_SECONDS
    try:
        with _connected(address, port, deadline) as connection:
            connection.sendall(_HEAD.pack(_MAGIC, ROUND_TRIPS, 0))
            round_trips: list[float] = []
            while len(round_trips) < ROUND_TRIPS and sum(round_trips) <= TIMING_SECONDS:
                began = time.perf_counter()
                connection.sendall(_CHUNK[:MESSAGE_BYTES])
                _receive(connection, MESSAGE_BYTES, deadline)
                round_trips.append(time.perf_counter() - began)
        round_trip = median(round_trips)
        with ThreadPoolExecutor(STREAMS) as pool:
            start_seconds = START_ROUND_TRIPS * round_trip
            until = time.monotonic() + start_seconds + SEND_SECONDS
            results = list(pool.map(lambda _: _send(address, port, start_seconds, until, deadline), range(STREAMS)))
    except TimeoutError:
        return MeasuredLink(error=f"not measured within {SESSION_SECONDS:.0f} s")
    except (OSError, PipedecError) as error:
        return MeasuredLink(error=str(getattr(error, "strerror", None) or error).lower())
    seconds = max(nanoseconds for _, nanoseconds in results) / 1e9
    return MeasuredLink(8e-9 * sum(num_bytes for num_bytes, _ in results) / seconds, round_trip / 2 * 1e6)


def _send(address: str, port: int, start_seconds: float, until: float, deadline: float) -> tuple[int, int]:
    """Send as much as possible until then. Returns the bytes that the other side received after ``start_seconds``, and its
    nanoseconds for them.
    """
    with _connected(address, port, deadline) as connection:
        connection.sendall(_HEAD.pack(_MAGIC, 0, round(1e9 * start_seconds)))
        while time.monotonic() < until:
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        num_bytes, nanoseconds = _RESULT.unpack(_receive(connection, _RESULT.size, deadline))
    return num_bytes, max(nanoseconds, 1)


def _serve(connection: socket.socket) -> None:
    """The other side of ``measure``. Ignores a peer that sends anything else, or nothing."""
    deadline = time.monotonic() + SESSION_SECONDS
    with suppress(OSError, PipedecError), connection:
        _prepare(connection, deadline)
        magic, messages, start_ns = _HEAD.unpack(_receive(connection, _HEAD.size, deadline))
        if magic != _MAGIC:
            return
        for _ in range(min(messages, ROUND_TRIPS)):
            connection.sendall(_receive(connection, MESSAGE_BYTES, deadline))
        buffer, num_bytes = bytearray(len(_CHUNK)), 0
        started = ended = time.perf_counter_ns() + start_ns
        while count := _within(connection, deadline).recv_into(buffer):  # until the other side has sent all
            if (now := time.perf_counter_ns()) > started:
                ended, num_bytes = now, num_bytes + count
        connection.sendall(_RESULT.pack(num_bytes, ended - started))


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Exactly so many bytes. Raises PipedecError if the other side ends the connection."""
    received = b""
    while len(received) < num_bytes:
        if not (part := _within(connection, deadline).recv(num_bytes - len(received))):
            raise PipedecError("the other side ended the connection")
        received += part
    return received


def _within(connection: socket.socket, deadline: float) -> socket.socket:
    """With the time that is left as its limit. Raises TimeoutError if none is."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    connection.settimeout(left)
    return connection


def _connected(address: str, port: int, deadline: float) -> socket.socket:
    return _prepare(socket.create_connection((address, port), max(0.001, deadline - time.monotonic())), deadline)


def _prepare(connection: socket.socket, deadline: float) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    return connection


def link_findings(given: Mapping[str, LinkSpec], facts: NetworkFacts, links: Mapping[str, MeasuredLink] | None) -> list[Finding]:
    """The row about the ``links`` from the host with these ``facts``, by target, and as they are ``given``; empty if it has no
    ranks (None).
    """
    if not links:
        return [] if links is None else [ok("links", "not measured: no rank here sends to another host")]
    shown = {host: link.error or f"{_rounded(link.gbps)} Gbit/s, {_duration(link.latency_us)}" for host, link in links.items()}
    value = "; ".join(f"to {host}: {text}" for host, text in shown.items())
    done = {host: link for host, link in links.items() if link.error is None}
    mends = []
    if len(done) < len(links):
        mends.append("run the doctor again, and see that nothing between the hosts limits connections")
    rates = [(link.gbps, 8 * given[host].gb_per_s) for host, link in done.items()]
    if slow := [(measured, wanted) for measured, wanted in rates if measured < SLOWEST_SHARE * wanted]:
        slowest, wanted = min(slow)
        speeds = {name: mbps / 1000 for name, mbps in facts.speeds_mbps.items() if name in facts.interfaces}
        own, fastest = speeds.get(facts.interface or "", 0), max(speeds, key=lambda name: speeds[name], default="")
        bandwidth = f"bandwidth is given as {wanted:g} Gbit/s"
        mend = f"set network: bandwidth_gbps: {_rounded(slowest)} {_IN_FILE}"
        if own <= 0 or own >= wanted:
            mends.append(f"{bandwidth}: see what else uses the link, on both hosts, or {mend}")
        elif speeds[fastest] > own:
            faster = f"set interface: {fastest} of this host in the file ({speeds[fastest]:g} Gbit/s)"
            mends.append(f"{bandwidth}, and {facts.interface} has negotiated {own:g}: {faster}")
        else:
            mends.append(f"{bandwidth}, and {facts.interface} has negotiated {own:g}: see cable and switch, or {mend}")
    if any(link.latency_us > LONG_US for link in done.values()):
        value += "; several timesteps will be in flight"
        if facts.slow_start_after_idle:
            mends.append("sysctl -w net.ipv4.tcp_slow_start_after_idle=0, so that TCP does not start slowly after every pause")
    latencies = [(link.latency_us, given[host].latency_us) for host, link in done.items()]
    if late := [(measured, wanted) for measured, wanted in latencies if measured > SLOWEST_TIMES * wanted + SPARE_US]:
        latest, wanted = max(late)
        mends.append(
            f"the latency is given as {wanted:g} µs: see what lies between the hosts, or set network: "
            f"latency_us: {_rounded(latest)} {_IN_FILE}"
        )
    return [note("links", value, "; ".join(mends)) if mends else ok("links", value)]


def _duration(microseconds: float) -> str:
    return f"{microseconds:.0f} µs" if microseconds < 1000 else f"{microseconds / 1000:.3g} ms"


def _rounded(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"
