"""The server's log on standard output: a line per event, as JSON or for people, without secrets, written by a thread of its own.

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
from typing import Literal

LOGGER = logging.getLogger("pipedec.server")
LogFormat = Literal["auto", "json", "text"]
_QUEUED = 10_000
_LAST_SECONDS = 1.0
_PASSWORD_IN_URL = re.compile(r"([a-z]+://[^/@\s\"]*:)[^@/\s\"]+@")
_WORD = re.compile(r"[^\s\"'=]+")
_HIDDEN = "***"
_UVICORN = "uvicorn.error"


class _RedactingFormatter(logging.Formatter):
    """Replaces secrets by ``***``.

    Args:
        secrets: texts that no line may contain, besides passwords in URLs.
    """

    def __init__(self, secrets: Collection[str] = ()) -> None:
        super().__init__()
        forms = {form for secret in secrets for form in (secret, _quoted(secret)[1:-1], json.dumps(secret)[1:-1])}
        self._secrets = sorted(forms, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        line = self._line(record)
        for secret in self._secrets:
            line = line.replace(secret, _HIDDEN)
        return _PASSWORD_IN_URL.sub(rf"\1{_HIDDEN}@", line)

    def _line(self, record: logging.LogRecord) -> str:
        raise NotImplementedError


class JsonFormatter(_RedactingFormatter):
    """One JSON object: time, level, event, and the fields of ``extra={"fields": …}``."""

    def _line(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(_RedactingFormatter):
    """A line for people: time, level, event and ``key=value``; or the text that the event has for them."""

    def _line(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = "".join(f" {name}={_shown(value)}" for name, value in getattr(record, "fields", {}).items())
        line = f"{when} {record.levelname:<7} {getattr(record, 'text', None) or record.getMessage() + fields}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


def _shown(value: object) -> str:
    """As it is if it is one word, else as JSON: nothing in a prompt may move the cursor of a terminal."""
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) and value.isprintable() else _quoted(value)
    return json.dumps(value, default=str)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=not text.isprintable())


class _Writer(logging.Handler):
    """Writes lines to a file descriptor. Unbuffered: a buffer that cannot be written would hold up the end of the process."""

    def __init__(self, descriptor: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._descriptor = os.dup(descriptor)  # ours until the thread ends, even if the other one is closed
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
            _complain("log lines are being lost: standard output is not read")
        self._has_dropped = True

    def write_to(self, writer: _Writer) -> None:
        """Write lines until None is among them."""
        while (record := self.lines.get()) is not None:
            writer.handle(record)
        writer.close()

    def end(self, thread: threading.Thread) -> None:
        """Wait for the remaining lines to be written, unless they are not read."""
        with suppress(queue.Full):
            self.lines.put(None, timeout=_LAST_SECONDS)
        thread.join(_LAST_SECONDS)


def _complain(message: str) -> None:
    print(f"pipedec: {message}", file=sys.stderr)


@contextmanager
def written_log(descriptor: int, secrets: Collection[str] = (), form: LogFormat = "auto") -> Iterator[None]:
    """While it is open, our events and uvicorn's warnings are written to a file descriptor, from a thread of its own.

    Args:
        secrets: texts that no line may contain, besides passwords in URLs.
        form: ``auto`` is ``text`` on a terminal, and ``json`` everywhere else.
    """
    is_text = os.isatty(descriptor) if form == "auto" else form == "text"
    formatter = TextFormatter(secrets) if is_text else JsonFormatter(secrets)
    handler = _LossyQueue()
    thread = threading.Thread(target=handler.write_to, args=(_Writer(descriptor, formatter),), name="log", daemon=True)
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


def log(event: str, level: int = logging.INFO, text: str | None = None, **fields: object) -> None:
    """Write one line; fields that are None are left out.

    Args:
        text: what people read instead of the event and its fields.
    """
    known = {name: value for name, value in fields.items() if value is not None}
    LOGGER.log(level, event, extra={"fields": known, "text": text})
