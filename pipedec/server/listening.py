"""Where the server listens: its sockets and its certificate, taken and checked before anything is loaded; and its connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipedec.core.errors import UserError
from pipedec.flags import Help
from pipedec.server.logs import log

MAX_HEAD_BYTES = 64 * 1024
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

BACKLOG = 2048
RESERVED_DESCRIPTORS = 64  # for everything but connections of clients: Redis, the cluster's process, files that are read
WANTED_DESCRIPTORS = 65536
_FULL_SECONDS = 60.0  # between two lines in the log about connections that wait
_PAUSE_SECONDS = 0.5  # after a connection could not be accepted
UNSENT_SECONDS = 120.0  # after which the kernel gives up a connection whose other end takes nothing, or is gone
_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # where clients on this machine reach it
_REASONS = {
    errno.EADDRINUSE: "is in use: choose another --port, or end the program that listens there",
    errno.EACCES: "needs root's rights: choose a --port above 1023, or let a reverse proxy listen there",
    errno.EADDRNOTAVAIL: "is no address of this machine: give --host one that it has, or 0.0.0.0 for all",
}


@dataclass(frozen=True)
class Address:
    """The address that the user has configured, with the flags of vLLM."""

    host: Annotated[str, Help("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Help("Port; 0 for a free one.")] = 8000
    uds: Annotated[Path | None, Help("Listen on a Unix socket instead.", "PATH")] = None
    ssl_keyfile: Annotated[Path | None, Help("Private key of the certificate, in PEM format.", "FILE")] = None
    ssl_certfile: Annotated[Path | None, Help("Certificate: serve https.", "FILE")] = None

    @contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """A socket that listens. Raises UserError, in one line, for anything that the system refuses."""
        listener = _tcp_socket(self.host, self.port) if self.uds is None else _unix_socket(self.uds)
        try:
            yield listener
        finally:
            listener.close()
            if self.uds is not None:
                self.uds.unlink(missing_ok=True)

    def check_certificate(self) -> None:
        """Raises UserError for a key without a certificate, or files that are not a pair of them."""
        if self.ssl_certfile is None and self.ssl_keyfile is None:
            return
        if self.ssl_certfile is None:
            raise UserError("--ssl-keyfile: give --ssl-certfile FILE, too")
        for flag, path in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", self.ssl_keyfile)):
            if path is not None and not os.access(path, os.R_OK):
                raise UserError(f"{flag} {path}: {'cannot be read' if path.exists() else 'there is no such file'}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: "")  # else OpenSSL asks on the terminal
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            raise UserError(
                f"--ssl-certfile {self.ssl_certfile}: not a certificate in PEM format with its private key ({reason}): "
                "give the key as --ssl-keyfile"
            ) from None

    def url(self, listener: socket.socket) -> str:
        scheme = "http" if self.ssl_certfile is None else "https"
        if self.uds is not None:
            return f"{scheme}://localhost"
        host = _ANY.get(self.host, self.host)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _tcp_socket(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host}: {getattr(error, 'strerror', None) or error}") from None
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNSENT_SECONDS))
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(f"port {port} on {host} {_REASONS.get(error.errno or 0, f'cannot be used: {error.strerror}')}") from None
    return listener


def _unix_socket(path: Path) -> socket.socket:
    """A listening Unix socket, which replaces one on which no process listens any more."""
    if path.exists() and not path.is_socket():
        raise UserError(f"--uds {path}: there is a file of that name, which is no socket: choose another path")
    listener = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError, FileNotFoundError):
            probe.connect(str(path))
            raise UserError(f"--uds {path}: another program listens there: choose another path")
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            raise UserError(f"--uds {path}: {error.strerror or error}") from None
        raise
    return listener


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's, with limits on a request's head: answers 431 to one of more than ``MAX_HEAD_BYTES``; closes the connection if it
    is not there in ``head_seconds``.

    Without these, a head without end would fill the memory, and connections that send a byte now and then would use up the
    descriptors. Bodies have their limits in the app.
    """

    head_seconds = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.has_closed = asyncio.Event()
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)
        self.has_closed.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_timer.cancel()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_timer.cancel()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(self.head_seconds, self.transport.close)


def most_connections() -> int:
    """Raise the limit of descriptors as far as possible. Returns the number of connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(1, (WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) - RESERVED_DESCRIPTORS)


async def accept(
    listener: socket.socket, make_protocol: Callable[[], LimitedConnection], tls: ssl.SSLContext | None, most: int
) -> None:
    """Accept connections, at most ``most`` at a time, until this is cancelled; those that are open go on."""
    loop, room, open_ones = asyncio.get_running_loop(), asyncio.Semaphore(most), set[asyncio.Task[None]]()
    told = -_FULL_SECONDS

    async def serve(connection: socket.socket) -> None:
        protocol = make_protocol()
        try:
            with connection, suppress(OSError):  # a handshake that fails
                await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
                await protocol.has_closed.wait()
        finally:
            room.release()

    listener.setblocking(False)
    while True:
        if room.locked() and loop.time() > told + _FULL_SECONDS:
            told = loop.time()
            log("connections_full", logging.WARNING, limit=most)
        await room.acquire()
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError:  # the client has gone, or the system has no descriptors left
            room.release()
            await asyncio.sleep(_PAUSE_SECONDS)
            continue
        task = asyncio.create_task(serve(connection))
        open_ones.add(task)
        task.add_done_callback(open_ones.discard)
