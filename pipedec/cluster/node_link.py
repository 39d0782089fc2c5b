"""The launcher's connection to the node of one host: a process of the user's own ssh, orders to it, news and output from it.

The host ``localhost`` is this machine: programs are started there without ssh. Explains in one line why a connection has failed.
Does not know what orders and news mean (``nodes``).
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any

from pipedec.config import ServerConfig
from pipedec.config.cluster import LaunchConfig
from pipedec.config.environment import ssh_program
from pipedec.core.errors import UserError

CONNECT_SECONDS = 8
NO_DIRECTORY = 101  # exit status of the remote command if its directory does not exist
SSH_FAILED = 255  # exit status of ssh itself if it has no connection, or has lost it
# A host that has vanished ends the connection after 15 seconds. ssh never asks for a password.
_OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=3")
NO_PROGRAM = (126, 127)  # exit statuses of a shell that could not run a program
NODE_MODULE = "pipedec.cluster.node"
_LINE_CHARS = 500
_LOG_LINES = 20_000
_REASON_CHARS = 200

News = tuple[str, "dict[str, Any] | None"]  # the host, and the object that its node sent; None once the connection has ended


def is_local(server: ServerConfig) -> bool:
    """Whether the server is this machine."""
    return server.ssh_destination == "localhost"


def ssh_command(server: ServerConfig) -> list[str]:
    """The local command line that connects to a host, up to what is to run there."""
    return [*ssh_program(), *(word for option in _OPTIONS for word in ("-o", option)), server.ssh_destination]


def ssh_failure(server: ServerConfig, printed: str) -> tuple[str, str]:
    """Why ssh has no connection to a host, by the line that it ``printed``, and what to do."""
    return (
        f"ssh failed: {printed.removeprefix('ssh: ') or 'no reason given'}",
        f"see that `ssh {server.ssh_destination}` works by itself",
    )


def node_python(server: ServerConfig, launch: LaunchConfig) -> str:
    """The interpreter on a host: the server's, else that of ``launch``, else the path of this process's own."""
    return server.python or launch.python or sys.executable


def node_command(server: ServerConfig, launch: LaunchConfig) -> list[str]:
    """The local command line that starts the node of a host, with the streams of the local process. It runs in the directory of
    ``launch``, with the exit status ``NO_DIRECTORY`` if that does not exist, or by default where the host's shell starts.
    """
    enter = f"cd {shlex.quote(launch.directory)} || exit {NO_DIRECTORY}; " if launch.directory else ""
    script = f"{enter}exec {shlex.join([node_python(server, launch), '-m', NODE_MODULE])}"
    return ["sh", "-c", script] if is_local(server) else [*ssh_command(server), script]


def end_links(links: Iterable[NodeLink], seconds: float) -> None:
    """End several connections at once; those that last longer than ``seconds`` are killed."""
    every, deadline = list(links), time.monotonic() + seconds
    for link in every:
        link.end()
    for link in every:
        link.wait(deadline)


class NodeLink:
    """A node that is being started, or runs. Raises UserError if there is no ssh on this machine.

    Args:
        news: receives the node's news.
        log: receives the host's output, each line after the host's name; None to drop it.
    """

    def __init__(self, server: ServerConfig, launch: LaunchConfig, news: SimpleQueue[News], log: IO[str] | None = None) -> None:
        self.server = server
        self.python = node_python(server, launch)
        self._directory = launch.directory
        self._news = news
        self._log = log
        self._printed: deque[str] = deque(maxlen=20)
        try:
            # A session of its own keeps Ctrl-C from it: the supervisor ends it when the ranks have ended.
            self._process = subprocess.Popen(
                node_command(server, launch), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            program = ssh_program()[0]
            raise UserError(
                f"cannot run {program} ({error.strerror}): install the client of OpenSSH, or set PIPEDEC_SSH"
            ) from None
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._scribe = threading.Thread(target=self._write_down, daemon=True)
        self._scribe.start()
        self._listener.start()

    def order(self, name: str, **contents: Any) -> None:
        """Send an order. It is no error if the connection has ended: that is reported as news."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # ended there, or closed here
            self._process.stdin.write(json.dumps({"order": name} | contents).encode() + b"\n")
            self._process.stdin.flush()

    def why_it_ended(self) -> str:
        """Why a node that should run has ended, and what to do, in one line that begins with the host."""
        reason, mend = self.reason_and_mend()
        return f"{self.server.host}: {reason}" + (f": {mend}" if mend else "")

    def reason_and_mend(self) -> tuple[str, str | None]:
        """Why a node that should run has ended, and what to do if that is known."""
        status, last = self._process.wait(), self.complaint()
        missing = next((found[1] for line in self._printed if (found := re.search(r"No module named '?([\w.]+)", line))), None)
        if status == SSH_FAILED and not is_local(self.server):
            return ssh_failure(self.server, last)
        if status == NO_DIRECTORY:
            return f"there is no directory {self._directory}", "create it, or correct launch.directory in the file"
        if status in NO_PROGRAM:
            return f"there is no interpreter {self.python}", "set python: of this server, or of launch, in the file"
        if missing is not None and missing.startswith("pipedec"):
            return f"{self.python} has no pipedec", "install it there, or set python: of this server in the file"
        if missing is not None:
            return f"{self.python} has no module {missing}, which pipedec needs", "install pipedec there with pip"
        return f"the node ended with exit status {status}" + (f": {last}" if last else ""), None

    def complaint(self) -> str:
        """The last line that the host printed; empty if it has printed none."""
        return self._printed[-1][:_REASON_CHARS] if self._printed else ""

    def end(self) -> None:
        """Let the node end what it has started, by closing its standard input."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, deadline: float) -> None:
        """Wait until the connection has ended; kill it at ``deadline`` (monotonic)."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in (self._listener, self._scribe):
            thread.join(1.0)

    def _listen(self) -> None:
        """Pass on the node's news, and skip what a login shell prints."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    news = json.loads(line)
                except ValueError:
                    continue
                if isinstance(news, dict) and "news" in news:
                    self._news.put((self.server.host, news))
        self._process.wait()
        self._scribe.join(1.0)
        self._news.put((self.server.host, None))

    def _write_down(self) -> None:
        """Keep the last lines of the host's output, and write the first ``_LOG_LINES`` to the log."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            texts = (text for line in lines if (text := line.decode(errors="replace").strip()))
            for number, text in enumerate(texts):
                self._printed.append(text)
                if self._log is None or number >= _LOG_LINES or self._log.closed:
                    continue
                try:
                    print(f"{self.server.host}: {text[:_LINE_CHARS]}", file=self._log, flush=True)
                except OSError as error:
                    self._log = None
                    print(f"pipedec: what {self.server.host} prints is no longer logged: {error.strerror}", file=sys.stderr)
