"""Processes that the tests start, told apart from all others, and waiting with a deadline."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from pipedec.scheduler import connect

if TYPE_CHECKING:
    from pipedec.cluster.local import LocalCluster

# Every process that the tests start, however indirectly, has this in its environment.
_NAME, _VALUE = "PIPEDEC_TESTS", uuid.uuid4().hex
MARK = f"{_NAME}={_VALUE}"
os.environ[_NAME] = _VALUE
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def marked_processes() -> set[int]:
    """Processes of this test session that are alive, but for this one and the helpers that multiprocessing keeps."""
    psutil.process_iter.cache_clear()  # it leaves out a process whose number it knows as that of an earlier one
    found = {process.pid for process in psutil.process_iter(["ppid", "cmdline"]) if not _is_helper(process)}
    return {pid for pid in found - {os.getpid()} if _is_marked(pid)}


def _is_helper(process: psutil.Process) -> bool:
    """Whether multiprocessing keeps it for this process: its fork server, from which ranks come, or its resource tracker."""
    program = " ".join(process.info["cmdline"] or ())
    own = ("from multiprocessing.forkserver import", "from multiprocessing.resource_tracker import")
    return process.info["ppid"] == os.getpid() and any(start in program for start in own)


def _is_marked(pid: int) -> bool:
    try:
        return MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # empty for a zombie
    except OSError:
        return False


def wait_until(condition: Callable[[], object], seconds: float = 15.0) -> bool:
    """Whether ``condition`` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def redis_of(cluster: LocalCluster) -> psutil.Process:
    """The Redis server that a cluster uses."""
    with connect(cluster.address.redis_url) as client:
        return psutil.Process(client.info("server")["process_id"])


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupts whatever the main thread waits for when it takes longer than this."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"nothing happened for {seconds:.0f} s")

    usual = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
