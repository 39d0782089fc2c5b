"""Log lines of the server: one JSON object per event on standard output, without secrets, written by a thread of its own.

A reader that stalls, or a full disk, costs log lines and never an answer.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import re
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

LOGGER = logging.getLogger("pipedec.server")
_QUEUED = 10_000
_LAST_SECONDS = 1.0
_PASSWORD_IN_URL = re.compile(r"([a-z]+://[^/@\s\"]*:)[^@/\s\"]+@")
_HIDDEN = "***"
_UVICORN = "uvicorn.error"


class JsonFormatter(logging.Formatter):
    """The fields of ``extra={"fields": …}`` behind time, level and event; secrets are replaced by ``***``.

    Args:
        secrets: texts that no line may contain, besides passwords in URLs.
    """

    def __init__(self, secrets: Collection[str] = ()) -> None:
        super().__init__()
        self._secrets = sorted({form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return self._redacted(json.dumps(line, default=str))

    def _redacted(self, line: str) -> str:
        for secret in self._secrets:
            line = line.replace(secret, _HIDDEN)
        return _PASSWORD_IN_URL.sub(rf"\1{_HIDDEN}@", line)


class _Writer(logging.Handler):
    """Writes lines to a file descriptor. Unbuffered: a buffer that cannot be written would hold up the end of the process."""

    def __init__(self, descriptor: int, secrets: Collection[str]) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter(secrets))
        self._descriptor = os.dup(descriptor)  # ours until the thread ends, whatever becomes of the other one
        self._has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = (self.format(record) + "\n").encode()
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            if not self._has_failed:
                _complain(f"log lines cannot be written: {error.strerror}")
            self._has_failed = True

    def close(self) -> None:
        os.close(self._descriptor)
        super().close()


class _LossyQueue(logging.handlers.QueueHandler):
    """Hands lines to the writer's thread; drops them when that does not keep up."""

    def __init__(self) -> None:
        self.lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_QUEUED)
        super().__init__(self.lines)
        self._has_dropped = False

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # it stays in this process

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self._has_dropped:
            _complain("log lines are being lost: nobody reads standard output")
        self._has_dropped = True

    def write_to(self, writer: _Writer) -> None:
        """Write lines until None is among them."""
        while (record := self.lines.get()) is not None:
            writer.handle(record)
        writer.close()

    def end(self, thread: threading.Thread) -> None:
        """Wait for what is still to be written, unless nobody reads it."""
        with suppress(queue.Full):
            self.lines.put(None, timeout=_LAST_SECONDS)
        thread.join(_LAST_SECONDS)


def _complain(message: str) -> None:
    print(f"pipedec: {message}", file=sys.stderr)


@contextmanager
def json_log(descriptor: int, secrets: Collection[str] = ()) -> Iterator[None]:
    """While it is open, our events and uvicorn's warnings are written to a file descriptor, from a thread of its own."""
    handler = _LossyQueue()
    thread = threading.Thread(target=handler.write_to, args=(_Writer(descriptor, secrets),), name="log", daemon=True)
    thread.start()
    loggers = [(LOGGER, logging.INFO), (logging.getLogger(_UVICORN), logging.WARNING)]
    for logger, level in loggers:
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, _ in loggers:
            logger.removeHandler(handler)
        handler.end(thread)


def log(event: str, level: int = logging.INFO, **fields: object) -> None:
    """Write one line; fields that are None are left out."""
    LOGGER.log(level, event, extra={"fields": {name: value for name, value in fields.items() if value is not None}})
