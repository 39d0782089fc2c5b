"""Connections to Redis, with every failure reported in one line and without passwords. Knows no key and no script."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipedec.core.errors import (
    EpochEnded,
    OutOfDescriptors,
    QueueFull,
    RankLost,
    SchedulerBusy,
    SchedulerInterrupted,
    SchedulerLost,
    UserError,
)

OLDEST_SERVER = (6, 2)
CONNECT_SECONDS = 3.0
# A server that vanished without closing the connection is noticed after REPLY_SECONDS; no reply takes longer, as blocking
# commands wait at most BLOCK_SECONDS.
REPLY_SECONDS = 10.0
BLOCK_SECONDS = 5.0
MAX_CONNECTIONS = 16  # for a process with an event loop
PATIENCE_SECONDS = 10.0  # how long a server may refuse commands temporarily
_REFUSALS = (redis.exceptions.BusyLoadingError, redis.exceptions.MasterDownError, redis.exceptions.OutOfMemoryError)
_REASONS = {
    "command not allowed when used memory": "has no memory left: raise its maxmemory",
    "is busy running a script": "is busy with a script that is not pipedec's: end that with SCRIPT KILL",
    "Link with MASTER is down": "is a replica that has lost its primary: give the primary's address",
    "unable to persist to disk": "refuses writes because it cannot save its data to disk: see its log",
    "Errors writing to the AOF file": "refuses writes because it cannot write its append-only file: make room on its disk",
    "Multiple keys request during rehashing": "is moving keys to another node",
}
_CODES: dict[str, type[Exception]] = {"FAILED": RankLost, "STALE": EpochEnded, "FULL": QueueFull}

_T = TypeVar("_T")


def address_of(url: str) -> str:
    """``host:port`` or the socket's path, without user and password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def connect(url: str) -> redis.Redis:
    """A client (connection pool) of the server at ``url``, once the server has answered and its version has been checked.

    Commands are never retried: redis-py by default runs a script a second time when only its reply was lost.

    ``url`` is one of ``RedisConfig``. Raises SchedulerLost within 5 seconds if the server cannot be reached, refuses the password
    or is older than 6.2.
    """
    _check_server(url)
    return redis.Redis.from_url(url, **options_of(url, REPLY_SECONDS))


async def async_connect(url: str) -> redis.asyncio.Redis:
    """As ``connect``, for asyncio. Has ``MAX_CONNECTIONS`` connections from the start; a command may wait for one of them."""
    await asyncio.to_thread(_check_server, url)
    options = {**options_of(url, REPLY_SECONDS), "retry": AsyncRetry(NoBackoff(), 0)}
    pool = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=REPLY_SECONDS, **options)
    with translated_errors(address_of(url)):
        for connection in await asyncio.gather(*(pool.get_connection() for _ in range(MAX_CONNECTIONS))):
            await pool.release(connection)
    return redis.asyncio.Redis.from_pool(pool)


def _check_server(url: str) -> None:
    """Raises as ``connect``."""
    address = address_of(url)
    with translated_errors(address), redis.Redis.from_url(url, **options_of(url, CONNECT_SECONDS)) as probe:
        info: Any = probe.info("server")
    check_version(address, str(info.get("valkey_version") or info.get("redis_version", "0")))


def options_of(url: str, reply_seconds: float) -> dict[str, Any]:
    """The options of a client of the server at ``url`` that waits ``reply_seconds`` for each reply and retries nothing."""
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": reply_seconds,
    }
    if not url.startswith("unix:"):  # detect a half-open connection within about 8 seconds, as far as the system supports it
        wanted = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 7}
        found = {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}
        options |= {"socket_keepalive": True, "socket_keepalive_options": found}
    return options


class DedicatedConnection:
    """One connection of ``client``'s pool, reserved for the commands on the pipeline's critical path.

    It skips redis-py's pool checkout, retries and metrics, which cost a rank more CPU than the command itself. Thread-safe: a
    call made while another one is in progress goes through the pool. No command is sent twice.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._busy = threading.Lock()
        self._connection: Any = None

    def call(self, *arguments: Any) -> Any:
        """Send one command and return its reply, undecoded. Raises redis-py's exceptions."""
        return self.call_all([arguments])[0]

    def call_all(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands and return their replies, undecoded, in one round trip. Raises redis-py's exceptions."""
        if not self._busy.acquire(blocking=False):
            return [self._client.execute_command(*command) for command in commands]
        try:
            return self._exchange(commands)
        finally:
            self._busy.release()

    def _exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        if self._connection is None:
            self._connection = self._client.connection_pool.get_connection()
        replies = list[Any]()
        try:
            self._connection.send_packed_command(self._connection.pack_commands(commands))
            for _ in commands:
                replies.append(self._connection.read_response())
            return replies
        except redis.ResponseError:
            if len(replies) + 1 < len(commands):
                self._drop()  # other replies follow
            raise
        except BaseException:
            # The reply may still arrive (a signal can interrupt the wait), and the next command must not read it.
            self._drop()
            raise

    def _drop(self) -> None:
        broken, self._connection = self._connection, None
        broken.disconnect()
        self._client.connection_pool.release(broken)


def server_clock_us(client: redis.Redis) -> int:
    """The server's clock, in µs since the epoch. Raises redis-py's exceptions."""
    seconds, microseconds = client.time()
    return int(seconds) * 1_000_000 + int(microseconds)


def check_version(address: str, version: str) -> None:
    """Raises SchedulerLost, naming the version, if the server is older than the scripts support."""
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if numbers < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise SchedulerLost(f"the Redis server at {address} is version {version}; pipedec needs {oldest} or newer")


def pauses(seconds: float) -> Iterator[float]:
    """The waiting times before a command that the server has refused temporarily is sent again: ``seconds`` in all."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while time.monotonic() + pause < deadline:
        yield pause
        pause = min(2 * pause, 0.5)


def is_refused_for_now(error: redis.RedisError) -> bool:
    """Whether the server has not executed the command, but may do so later."""
    return isinstance(error, _REFUSALS) or (isinstance(error, redis.ResponseError) and _reason(str(error)) is not None)


def patiently(command: Callable[[], _T], address: str, seconds: float) -> _T:
    """Send a command, repeatedly for ``seconds`` while the server refuses it temporarily. Raises as ``translated_errors``."""
    with translated_errors(address):
        for pause in pauses(seconds):
            try:
                return command()
            except redis.RedisError as error:
                if not is_refused_for_now(error):
                    raise
            time.sleep(pause)
        return command()


async def async_patiently(command: Callable[[], Awaitable[_T]], address: str, seconds: float) -> _T:
    """As ``patiently``, for asyncio."""
    with translated_errors(address):
        for pause in pauses(seconds):
            try:
                return await command()
            except redis.RedisError as error:
                if not is_refused_for_now(error):
                    raise
            await asyncio.sleep(pause)
        return await command()


@contextlib.contextmanager
def translated_errors(address: str) -> Iterator[None]:
    """Turns redis-py's exceptions, and the ``PIPEDEC`` error replies of our scripts, into one-line pipedec errors."""
    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
        raise SchedulerLost(f"wrong Redis password for {address}") from None
    except redis.exceptions.BusyLoadingError:
        raise SchedulerBusy(f"Redis at {address} is still loading its data") from None
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        if _lacks_descriptors(error):
            raise OutOfDescriptors(f"this process has too many open files to connect to Redis at {address}: ulimit -n") from None
        reason = "it does not answer" if isinstance(error, (redis.TimeoutError, TimeoutError)) else "the connection failed"
        raise SchedulerInterrupted(f"cannot reach Redis at {address}: {reason}") from None
    except redis.ResponseError as error:
        raise _script_error(address, str(error)) from None


def _lacks_descriptors(error: BaseException | None) -> bool:
    """Whether this is why a connection was not opened; redis-py leaves it to the cause of its own error."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    return error is not None and _lacks_descriptors(error.__cause__ or error.__context__)


def _script_error(address: str, text: str) -> Exception:
    if text.startswith(("NOAUTH", "WRONGPASS")) or "without any password" in text:
        return SchedulerLost(f"wrong Redis password for {address}")
    if (reason := _reason(text)) is not None:
        return SchedulerBusy(f"Redis at {address} {reason}")
    if "read only replica" in text:
        return SchedulerLost(f"Redis at {address} is a read-only replica: give the address of its primary")
    if not text.startswith("PIPEDEC "):
        return SchedulerLost(f"Redis at {address} refused a command: {text[:300]}")
    _, code, message = text.split(" ", 2)
    if code == "LOST":
        return lost_run(address)
    return _CODES.get(code, UserError)(message)


def lost_run(address: str) -> SchedulerLost:
    """The error if Redis no longer has a run that is up."""
    cause = "its keys were deleted, or it has restarted without its data (set appendonly yes there)"
    return SchedulerLost(f"Redis at {address} has lost the run: {cause}")


def _reason(text: str) -> str | None:
    """Why a server refuses commands temporarily; None if it does not."""
    return next((reason for sign, reason in _REASONS.items() if sign in text), None)
