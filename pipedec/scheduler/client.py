"""Connects to Redis and says in one line what went wrong; it knows no key and no script. Passwords are never shown."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipedec.core import RankLost, SchedulerLost, UserError

OLDEST_SERVER = (6, 2)
CONNECT_SECONDS = 3.0
# No single command may take longer, and no blocking one is asked to wait longer than BLOCK_SECONDS: a server that is
# gone without a word is noticed after this time.
REPLY_SECONDS = 10.0
BLOCK_SECONDS = 5.0


def address_of(url: str) -> str:
    """``host:port`` or the socket's path, without user and password."""
    try:
        parts = urlsplit(url)
        return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
    except ValueError:
        raise UserError("the Redis address is not a URL like redis://:password@host:6379") from None


def connect(url: str) -> redis.Redis:
    """A checked connection (pool) to the server at ``url``: ``redis://``, ``rediss://`` or ``unix://``.

    Commands are never retried: redis-py's default runs a script twice whose reply was lost. Raises SchedulerLost within 5
    seconds if the server cannot be reached, refuses the password or is older than 6.2; UserError if it is no URL.
    """
    address = address_of(url)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise UserError(f"the Redis address of {address} must start with redis://, rediss:// or unix://")
    with translated(address), _client(url, reply_seconds=CONNECT_SECONDS) as probe:
        info: Any = probe.info("server")
    check_version(address, str(info.get("valkey_version") or info.get("redis_version", "0")))
    return _client(url, REPLY_SECONDS)


def _client(url: str, reply_seconds: float) -> redis.Redis:
    keepalive: dict[str, Any] = {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    return redis.Redis.from_url(
        url,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=reply_seconds,
        **({} if url.startswith("unix:") else keepalive),
    )


class OwnConnection:
    """One connection of ``client``'s pool, kept by its user for the commands that decide how fast the pipeline is.

    redis-py's checkout, retries and metrics around every command cost a rank more CPU than the command itself; here a command
    is written and its reply is read. A second thread that calls meanwhile goes through the pool, so any thread may call
    at any time. Nothing is sent twice.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._busy = threading.Lock()
        self._connection: Any = None

    def call(self, *words: Any) -> Any:
        """Send one command and return its reply, undecoded. Raises what redis-py raises."""
        if not self._busy.acquire(blocking=False):
            return self._client.execute_command(*words)
        try:
            return self._exchange(words)
        finally:
            self._busy.release()

    def _exchange(self, words: tuple[Any, ...]) -> Any:
        if self._connection is None:
            self._connection = self._client.connection_pool.get_connection()
        try:
            self._connection.send_command(*words)
            return self._connection.read_response()
        except redis.ResponseError:
            raise  # the server's answer: the connection is in order
        except BaseException:
            # A reply may still be on its way (a signal can interrupt the wait): no later command may read it.
            broken, self._connection = self._connection, None
            broken.disconnect()
            self._client.connection_pool.release(broken)
            raise


def check_version(address: str, version: str) -> None:
    """Raises SchedulerLost, naming the version, if a server is too old for the scripts."""
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if numbers < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise SchedulerLost(f"the Redis server at {address} is version {version}; pipedec needs {oldest} or newer")


@contextlib.contextmanager
def translated(address: str) -> Iterator[None]:
    """Turns redis-py's errors, and the PIPEDEC errors of our scripts, into one clear line of our own."""
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
    return UserError(message)


def _keepalive() -> dict[int, int]:
    """Probes that find a half-open connection after about 4 seconds, where the system has them."""
    wanted = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}
