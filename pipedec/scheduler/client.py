"""Connections to Redis, with every failure reported in one line and without passwords. Knows no key and no script."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipedec.core import QueueFull, RankLost, SchedulerLost, UserError

OLDEST_SERVER = (6, 2)
CONNECT_SECONDS = 3.0
# A server that vanished without closing the connection is noticed after REPLY_SECONDS: blocking commands wait at most
# BLOCK_SECONDS, so no reply takes longer.
REPLY_SECONDS = 10.0
BLOCK_SECONDS = 5.0
MAX_CONNECTIONS = 16  # of a process with an event loop


def address_of(url: str) -> str:
    """``host:port`` or the socket's path, without user and password. Raises UserError if ``url`` cannot be parsed."""
    try:
        parts = urlsplit(url)
        return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
    except ValueError:
        raise UserError("the Redis address is not a URL like redis://:password@host:6379") from None


def connect(url: str) -> redis.Redis:
    """A client (connection pool) of the server at ``url``, which has answered and whose version has been checked.

    Commands are never retried: redis-py's default would run a script a second time when only its reply was lost.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.

    Raises:
        SchedulerLost: within 5 seconds, if the server cannot be reached, refuses the password or is older than 6.2.
        UserError: ``url`` is not such a URL.
    """
    address = _checked_address(url)
    with translated_errors(address), redis.Redis.from_url(url, **_options(url, CONNECT_SECONDS)) as probe:
        info: Any = probe.info("server")
    check_version(address, _version_of(info))
    return redis.Redis.from_url(url, **_options(url, REPLY_SECONDS))


async def async_connect(url: str) -> redis.asyncio.Redis:
    """As ``connect``, for asyncio. Has at most ``MAX_CONNECTIONS``, for one of which a command may wait."""
    address = _checked_address(url)
    with translated_errors(address):
        async with redis.asyncio.Redis.from_url(url, **_async_options(url, CONNECT_SECONDS)) as probe:
            info: Any = await probe.info("server")
    check_version(address, _version_of(info))
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, max_connections=MAX_CONNECTIONS, timeout=REPLY_SECONDS, **_async_options(url, REPLY_SECONDS)
    )
    return redis.asyncio.Redis.from_pool(pool)


def _checked_address(url: str) -> str:
    """See ``address_of``. Raises UserError also for another scheme."""
    address = address_of(url)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise UserError(f"the Redis address of {address} must start with redis://, rediss:// or unix://")
    return address


def _options(url: str, reply_seconds: float) -> dict[str, Any]:
    keepalive: dict[str, Any] = {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    return {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": reply_seconds,
        **({} if url.startswith("unix:") else keepalive),
    }


def _async_options(url: str, reply_seconds: float) -> dict[str, Any]:
    return {**_options(url, reply_seconds), "retry": AsyncRetry(NoBackoff(), 0)}


class DedicatedConnection:
    """One connection of ``client``'s pool, reserved for the commands on the pipeline's critical path.

    redis-py's pool checkout, retries and metrics cost a rank more CPU than the command itself; here the command is written
    and its reply is read, nothing else. Thread-safe: a call made while another one is in progress goes through the pool.
    No command is sent twice.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._busy = threading.Lock()
        self._connection: Any = None

    def call(self, *arguments: Any) -> Any:
        """Send one command and return its reply, undecoded. Raises redis-py's exceptions."""
        if not self._busy.acquire(blocking=False):
            return self._client.execute_command(*arguments)
        try:
            return self._exchange(arguments)
        finally:
            self._busy.release()

    def _exchange(self, arguments: tuple[Any, ...]) -> Any:
        if self._connection is None:
            self._connection = self._client.connection_pool.get_connection()
        try:
            self._connection.send_command(*arguments)
            return self._connection.read_response()
        except redis.ResponseError:
            raise  # a complete reply: the connection can be used again
        except BaseException:
            # The reply may still arrive (a signal can interrupt the wait), and the next command must not read it.
            broken, self._connection = self._connection, None
            broken.disconnect()
            self._client.connection_pool.release(broken)
            raise


def _version_of(info: Mapping[str, Any]) -> str:
    return str(info.get("valkey_version") or info.get("redis_version", "0"))


def check_version(address: str, version: str) -> None:
    """Raises SchedulerLost, naming the version, if the server is older than the scripts support."""
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if numbers < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise SchedulerLost(f"the Redis server at {address} is version {version}; pipedec needs {oldest} or newer")


@contextlib.contextmanager
def translated_errors(address: str) -> Iterator[None]:
    """Turns redis-py's exceptions, and the ``PIPEDEC`` error replies of our scripts, into one-line pipedec errors."""
    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
        raise SchedulerLost(f"wrong Redis password for {address}") from None
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        reason = "it does not answer" if isinstance(error, (redis.TimeoutError, TimeoutError)) else "the connection failed"
        raise SchedulerLost(f"cannot reach Redis at {address}: {reason}") from None
    except redis.ResponseError as error:
        raise _script_error(address, str(error)) from None


def _script_error(address: str, text: str) -> Exception:
    if text.startswith(("NOAUTH", "WRONGPASS")) or "without any password" in text:
        return SchedulerLost(f"wrong Redis password for {address}")
    if not text.startswith("PIPEDEC "):
        return SchedulerLost(f"Redis at {address} refused a command: {text[:300]}")
    _, code, message = text.split(" ", 2)
    if code == "FAILED":
        return RankLost(message)
    if code == "LOST":
        return SchedulerLost(f"Redis at {address} lost the run: {message}")
    if code == "FULL":
        return QueueFull(message)
    return UserError(message)


def _keepalive() -> dict[int, int]:
    """Socket options that detect a half-open connection within about 4 seconds, as far as the system supports them."""
    wanted = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}
