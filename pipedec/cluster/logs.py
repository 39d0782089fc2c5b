"""The log files of a run, in the state directory: one per rank, and one for the watch over a host's ranks.

Modules log with ``logging.getLogger(__name__)``: at INFO what was chosen and why, epochs, losses, refusals and slow timesteps.
Prompts, answers, passwords and the URL of Redis are never logged. Loads no torch.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from threading import get_ident
from urllib.parse import quote

from pipedec.config import state_directory
from pipedec.config.settings import LogLevel
from pipedec.core.errors import PipedecError

MOST_BYTES = 10_000_000  # size of a log, and of the older one that is kept beside it
MOST_RUNS = 20  # runs whose logs are kept, besides those that are up
WATCH = "watch"  # the log of the supervisor that replaces the ranks of a host
_PACKAGE = logging.getLogger("pipedec")


def log_directory(run_id: str) -> Path:
    """The directory for the logs of a run on this host. Raises UserError if there can be no state directory."""
    return state_directory() / "logs" / quote(run_id, safe="")


@contextmanager
def run_log(run_id: str, name: str, level: LogLevel, epoch: Callable[[], int], own_process: bool = True) -> Iterator[None]:
    """Write what this process logs to ``name``.log in the run's directory, each line with its ``epoch``. Errors of the disk are
    ignored, so that they stop no rank.

    With ``own_process`` the level of the package's logger is set. Otherwise the process is the user's: only what this thread logs
    is written, at the level that the user has chosen (by default WARNING).
    """
    try:
        path = _opened(run_id) / f"{name}.log"
        handler = _LogFile(path, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
    except (OSError, PipedecError):
        yield
        return
    # Lines such as ``2026-11-25T15:43:07.123Z INFO rank-3 epoch 0 pipedec.cluster.rank: …``, in UTC.
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(source)s epoch %(epoch)d %(name)s: %(message)s")
    formatter.converter = time.gmtime
    formatter.default_time_format, formatter.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"

    def from_here(record: logging.LogRecord) -> bool:
        record.source, record.epoch = name, epoch()
        return own_process or record.thread == thread

    thread = get_ident()
    handler.addFilter(from_here)
    handler.setFormatter(formatter)
    handler.setLevel(level.upper())
    if own_process:
        _PACKAGE.setLevel(level.upper())
    _PACKAGE.addHandler(handler)
    try:
        yield
    finally:
        _PACKAGE.removeHandler(handler)
        handler.close()


class _LogFile(RotatingFileHandler):
    """A file that is locked as long as it is open, so that it is not removed."""

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        fcntl.flock(stream, fcntl.LOCK_SH)
        return stream

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """The disk is full: the line is lost."""


def _opened(run_id: str) -> Path:
    """The directory of a run's logs, created if necessary; removes the oldest of other runs."""
    directory = log_directory(run_id)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    others = [other for other in directory.parent.iterdir() if other != directory]
    with suppress(OSError):  # another process removes them, too
        others.sort(key=lambda other: other.stat().st_mtime, reverse=True)
        for old in others[MOST_RUNS - 1 :]:
            with suppress(BlockingIOError), ExitStack() as opened:
                for path in old.glob("*.log"):  # a process that writes to one holds a lock
                    fcntl.flock(opened.enter_context(path.open()), fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old)
    return directory
