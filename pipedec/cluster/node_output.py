"""Output of a node and its ranks: it goes to the launcher as long as that reads, and afterwards into a file on the host."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pipedec.config import state_directory

LOG_NAME = "node.log"
MOST_BYTES = 20_000_000  # in the file
_DRAIN_SECONDS = 0.5


@contextmanager
def relayed_output() -> Iterator[None]:
    """Standard output and error of this process and of those that it starts go through a thread of this one."""
    usual = os.dup(2)
    receiver, sender = os.pipe()
    os.set_inheritable(sender, True)
    for descriptor in (1, 2):
        os.dup2(sender, descriptor)
    os.close(sender)
    thread = threading.Thread(target=_relay, args=(receiver, usual), name="output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for descriptor in (1, 2):
            os.dup2(usual, descriptor)
        thread.join(_DRAIN_SECONDS)  # it ends when no process holds the other end


def _relay(receiver: int, launcher: int) -> None:
    log: int | None = None
    written = 0
    while text := os.read(receiver, 65536):
        try:
            if log is None:
                os.write(launcher, text)
                continue
        except OSError:  # it reads no longer
            log = os.open(state_directory() / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        assert log is not None
        if written < MOST_BYTES:
            written += len(text)
            _write(log, text)


def _write(log: int, text: bytes) -> None:
    try:
        os.write(log, text)
    except OSError:  # the disk is full: the run goes on
        return
