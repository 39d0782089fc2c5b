"""The program as a shell runs it: called in this process, as processes of its own, or on a terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).parent / "pipedec"
Started = Callable[..., "subprocess.Popen[bytes]"]


@dataclass(frozen=True)
class Ended:
    """How a run of a command ended."""

    status: int
    out: str
    err: str

    def refused(self, status: int = 2) -> str:
        """The one line that says why; fails if it is anything else than one line and this exit status."""
        assert self.status == status, (self.status, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("pipedec: "), self.err
        assert "Traceback" not in self.err and self.out == ""
        return lines[0].removeprefix("pipedec: ")


Calls = Callable[..., Ended]


def caller(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Calls:
    """A function that calls ``run`` with its arguments as those of the command line."""

    def call(*arguments: str | Path, stdin: bytes = b"") -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["pipedec", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            run()
        status = left.value.code
        captured = capsys.readouterr()
        return Ended(status if isinstance(status, int) else 0, captured.out, captured.err)

    return call


def take_terminal(slave: int) -> None:
    """Make it the terminal of this process. Ctrl-C typed there reaches it even if the tests were started with Ctrl-C ignored."""
    os.login_tty(slave)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def programs() -> Iterator[Started]:
    """Yields a function that starts the program in a process group of its own; whatever still runs at the end is killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str | Path, background: bool = False) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # A program starts deaf to Ctrl-C if its parent is: decide it here, whatever the tests' own parent decided.
        usual = signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler)
        process = subprocess.Popen(
            [PROGRAM, *map(str, arguments)], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True, bufsize=0,
        )  # fmt: skip
        signal.signal(signal.SIGINT, usual)
        processes.append(process)
        return process

    try:
        yield start
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait(10)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


class Terminal:
    """The program on a pseudo-terminal.

    Attributes:
        shown: what it has written since the last text that was waited for.
    """

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        self._master, self._slave = pty.openpty()
        self._before = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [PROGRAM, *map(str, arguments)], stdin=self._slave, stdout=self._slave, stderr=self._slave,
            env={**os.environ, **environment}, preexec_fn=lambda: take_terminal(os.dup(self._slave)),
        )  # fmt: skip
        self.shown = ""

    def read(self, seconds: float = 60.0) -> bool:
        """Take what it writes next; False if that is nothing in this time."""
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        self.shown += os.read(self._master, 4096).decode(errors="replace")
        return True

    def until(self, *texts: str) -> str:
        """Read until all of the texts have been written, and return what was before the end of the last one."""
        ends = time.monotonic() + 60.0
        while not all(text in self.shown for text in texts):
            assert time.monotonic() < ends and self.read(), (texts, self.shown)
        place = max(self.shown.index(text) + len(text) for text in texts)
        before, self.shown = self.shown[:place], self.shown[place:]
        return before

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ended(self) -> int:
        """The exit status; the terminal is as it was."""
        ends = time.monotonic() + 60.0
        while self.process.poll() is None:
            assert time.monotonic() < ends, self.shown
            self.read(0.1)
        while self.read(0):
            continue
        assert "Traceback" not in self.shown
        assert termios.tcgetattr(self._slave) == self._before
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        os.close(self._master)
        os.close(self._slave)
