"""The launcher's connection to the node of one host: a process of ssh, orders to it, news and complaints from it.

Knows why a connection fails and says so in one line. What orders and news mean is the business of ``nodes``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import IO, Any

from pipedec.cluster.ssh import NO_DIRECTORY, SSH_FAILED, is_local, remote_command
from pipedec.config import ServerConfig, ssh_program
from pipedec.core import UserError

NO_PROGRAM = (126, 127)  # exit statuses of a shell that could not run a program
NODE_MODULE = "pipedec.cluster.node"
_LINE_CHARS = 500
_LOG_LINES = 20_000
_REASON_CHARS = 200

News = tuple[str, "dict[str, Any] | None"]  # the host, and what its node says; None once the connection has ended


class NodeLink:
    """A node that is being started, or runs.

    Args:
        python: the interpreter there.
        directory: where it runs there; None for where the host's shell starts.
        news: gets what the node says.
        log: gets what the host prints, each line after the host's name; None to drop it.
        module: what runs there, and speaks as a node does.

    Raises:
        UserError: there is no ssh on this machine.
    """

    def __init__(
        self, server: ServerConfig, python: str, directory: str | None, news: SimpleQueue[News], log: IO[str] | None,
        module: str = NODE_MODULE,
    ) -> None:  # fmt: skip
        self.server = server
        self._python = python
        self._directory = directory
        self._module = module
        self._news = news
        self._log = log
        self._printed: deque[str] = deque(maxlen=20)
        self._process = self._spawn()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._scribe = threading.Thread(target=self._write_down, daemon=True)
        self._scribe.start()
        self._listener.start()

    @staticmethod
    def command(server: ServerConfig, python: str, directory: str | None, module: str = NODE_MODULE) -> list[str]:
        """The command line that starts the node of ``server``."""
        return remote_command(server, [python, "-m", module], directory)

    def order(self, name: str, **contents: Any) -> None:
        """Give an order. One that does not arrive is no error: the end of the connection is news."""
        self.write(json.dumps({"order": name} | contents).encode() + b"\n")

    def write(self, content: bytes) -> bool:
        """Send bytes; whether there is still a connection."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # it has ended there, or was ended here
            return False
        return True

    def why_it_ended(self) -> str:
        """Why a node that should run has ended, and what to do, in one line that begins with the host."""
        reason, mend = self.reason_and_mend()
        return f"{self.server.host}: {reason}" + (f": {mend}" if mend else "")

    def reason_and_mend(self) -> tuple[str, str | None]:
        """Why a node that should run has ended, and what to do if that is known."""
        status, last = self._process.wait(), self._last_line()
        missing = next((found[1] for line in self._printed if (found := re.search(r"No module named '?([\w.]+)", line))), None)
        if status == SSH_FAILED and not is_local(self.server):
            reason = f"ssh failed: {last.removeprefix('ssh: ') or 'no reason given'}"
            return reason, f"see that `ssh {self.server.ssh_destination}` works by itself"
        if status == NO_DIRECTORY:
            return f"there is no directory {self._directory}", "create it, or correct launch.directory in the file"
        if status in NO_PROGRAM:
            return f"there is no interpreter {self._python}", "set python: of this server, or of launch, in the file"
        if missing is not None and missing.startswith("pipedec"):
            return f"{self._python} has no pipedec", "install it there, or set python: of this server in the file"
        if missing is not None:
            return f"{self._python} has no module {missing}, which pipedec needs", "install pipedec there with pip"
        return f"the node ended with exit status {status}" + (f": {last}" if last else ""), None

    def complaint(self) -> str | None:
        """The last line that the host printed, or None."""
        return self._last_line() or None

    def end(self) -> None:
        """Let the node end what it has started, by closing its standard input."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            return

    def wait(self, deadline: float) -> None:
        """Wait until the connection has ended; end it by force at ``deadline`` (of ``time.monotonic``)."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in (self._listener, self._scribe):
            thread.join(1.0)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = self.command(self.server, self._python, self._directory, self._module)
        try:
            # A session of its own keeps Ctrl-C from it: the supervisor ends it when the ranks have ended.
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            program = ssh_program()[0]
            raise UserError(
                f"cannot run {program} ({error.strerror}): install the client of OpenSSH, or set PIPEDEC_SSH"
            ) from None

    def _listen(self) -> None:
        """Pass on the node's news, without the output of login shells."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    said = json.loads(line)
                except ValueError:
                    continue
                if isinstance(said, dict) and "news" in said:
                    self._news.put((self.server.host, said))
        self._process.wait()
        self._scribe.join(1.0)
        self._news.put((self.server.host, None))

    def _write_down(self) -> None:
        """Keep the last lines that the host prints, and write them into the log as long as there are not too many."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            texts = (text for line in lines if (text := line.decode(errors="replace").strip()))
            for number, text in enumerate(texts):
                self._printed.append(text)
                if self._log is not None and number < _LOG_LINES and not self._log.closed:
                    self._log_line(f"{self.server.host}: {text[:_LINE_CHARS]}")

    def _log_line(self, text: str) -> None:
        try:
            print(text, file=self._log, flush=True)
        except OSError as error:
            self._log = None
            print(f"pipedec: what {self.server.host} prints is no longer logged: {error.strerror}", file=sys.stderr)

    def _last_line(self) -> str:
        return self._printed[-1][:_REASON_CHARS] if self._printed else ""
