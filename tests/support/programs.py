"""The program as processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Started = Callable[..., "subprocess.Popen[bytes]"]


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
            [Path(sys.executable).parent / "pipedec", *map(str, arguments)], stdin=subprocess.DEVNULL,
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
