"""How fast the network between two hosts is, by plain TCP: one host serves, the other one measures.

The client sends a head, then messages that the server sends back, then as much as it can for some time, and gets the number of
bytes that have arrived and how long that took. Everything has a deadline. Judges nothing.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median

from pipedec.core import PipedecError

ROUND_TRIPS = 100
SEND_SECONDS = 1.0
STREAMS = 4  # one connection may be bound by a processor where the network is not
SESSION_SECONDS = 15.0  # for a whole measurement, both sides
MESSAGE_BYTES = 64
BUFFER_BYTES = 1 << 18  # that may still be on the way when the time is over
_HEAD = struct.Struct("!8sI")  # and the number of messages
_RESULT = struct.Struct("!QQ")  # bytes, nanoseconds
_MAGIC = b"pdlinks1"
_CHUNK = bytes(1 << 18)


@dataclass(frozen=True)
class MeasuredLink:
    """Either ``error``, or the rate in Gbit/s and the latency of one way in microseconds, half the median round trip."""

    gbps: float = 0.0
    latency_us: float = 0.0
    error: str | None = None


class LinkServer:
    """Answers measurements on a listening socket, in threads of its own, until the socket is closed."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Measurements that have begun go on until their deadline."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def measure(address: str, port: int) -> MeasuredLink:
    """Measure the way to a host whose ``LinkServer`` listens there. Takes ``SEND_SECONDS``, or ``SESSION_SECONDS`` at most."""
    deadline = time.monotonic() + SESSION_SECONDS
    try:
        with _connected(address, port, deadline) as connection:
            latency_us = _round_trips(connection, deadline)
        with ThreadPoolExecutor(STREAMS) as pool:
            started = time.monotonic()
            results = list(pool.map(lambda _: _send(address, port, started + SEND_SECONDS, deadline), range(STREAMS)))
    except TimeoutError:
        return MeasuredLink(error=f"not measured within {SESSION_SECONDS:.0f} s")
    except (OSError, PipedecError) as error:
        return MeasuredLink(error=str(getattr(error, "strerror", None) or error).lower())
    seconds = max(nanoseconds for _, nanoseconds in results) / 1e9
    return MeasuredLink(8e-9 * sum(num_bytes for num_bytes, _ in results) / seconds, latency_us)


def _round_trips(connection: socket.socket, deadline: float) -> float:
    """Half the median of all round trips, in microseconds."""
    connection.sendall(_HEAD.pack(_MAGIC, ROUND_TRIPS))
    times = []
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        connection.sendall(_CHUNK[:MESSAGE_BYTES])
        _receive(connection, MESSAGE_BYTES, deadline)
        times.append(time.perf_counter() - started)
    return median(times) / 2 * 1e6


def _send(address: str, port: int, until: float, deadline: float) -> tuple[int, int]:
    """Send as much as fits through until then. Bytes that the other side has received, and nanoseconds that it took."""
    with _connected(address, port, deadline) as connection:
        connection.sendall(_HEAD.pack(_MAGIC, 0))
        while time.monotonic() < until:
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        num_bytes, nanoseconds = _RESULT.unpack(_receive(connection, _RESULT.size, deadline))
    return num_bytes, max(nanoseconds, 1)


def _serve(connection: socket.socket) -> None:
    """The other side of ``measure``. A peer that sends anything else, or nothing, is left alone."""
    deadline = time.monotonic() + SESSION_SECONDS
    with suppress(OSError, PipedecError), connection:
        _prepare(connection)
        magic, messages = _HEAD.unpack(_receive(connection, _HEAD.size, deadline))
        if magic != _MAGIC:
            return
        for _ in range(min(messages, ROUND_TRIPS)):
            connection.sendall(_receive(connection, MESSAGE_BYTES, deadline))
        connection.sendall(_RESULT.pack(*_drain(connection, deadline)))


def _drain(connection: socket.socket, deadline: float) -> tuple[int, int]:
    """Receive until the other side has sent all: bytes, and nanoseconds from the first to the last of them."""
    buffer, num_bytes, started, ended = bytearray(len(_CHUNK)), 0, 0, 0
    while count := _within(connection, deadline).recv_into(buffer):
        ended = time.perf_counter_ns()
        started = started or ended
        num_bytes += count
    return num_bytes, ended - started


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


@contextmanager
def _connected(address: str, port: int, deadline: float) -> Iterator[socket.socket]:
    with socket.create_connection((address, port), max(0.001, deadline - time.monotonic())) as connection:
        _prepare(connection)
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        yield connection


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    connection.settimeout(SESSION_SECONDS)
