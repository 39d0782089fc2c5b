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
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import to_builtins

from pipedec.core.completion import Completion
from pipedec.core.sampling import SamplingParams
from pipedec.server.front import Generation, HttpExchange, Observer

LOGGER = logging.getLogger("pipedec.server")
LogFormat = Literal["auto", "json", "text"]
_QUEUED = 10_000
_LAST_SECONDS = 1.0
_PASSWORD_IN_URL = re.compile(r"([a-z]+://[^/@\s\"]*:)[^@/\s\"]+@")
_WORD = re.compile(r"[^\s\"'=]+")
_HIDDEN = "***"
_POLLED = ("/health", "/ready", "/metrics")
_POLL_ANSWERS = (200, 503)
_ID_CHARS = 200
_DEFAULTS = to_builtins(SamplingParams())


class _RedactingFormatter(logging.Formatter):
    """Lines for people, or JSON, in which ``secrets`` and passwords in URLs are replaced by ``***``."""

    def __init__(self, secrets: Collection[str], is_text: bool) -> None:
        super().__init__()
        forms = {form for secret in secrets for form in (secret, _quoted(secret)[1:-1], json.dumps(secret)[1:-1])}
        self._secrets = sorted(forms, key=len, reverse=True)
        self._is_text = is_text

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, event and the fields of ``extra={"fields": …}``; people read the event's ``text`` if it has one."""
        fields: dict[str, object] = getattr(record, "fields", {})
        traceback = self.formatException(record.exc_info) if record.exc_info else None
        if self._is_text:
            when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
            text = "".join(f" {name}={_shown(value)}" for name, value in fields.items())
            line = f"{when} {record.levelname:<7} {getattr(record, 'text', None) or record.getMessage() + text}"
            line += "" if traceback is None else f"\n{traceback}"
        else:
            when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            document = {"time": when, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
            line = json.dumps(document if traceback is None else document | {"traceback": traceback}, default=str)
        for secret in self._secrets:
            line = line.replace(secret, _HIDDEN)
        return _PASSWORD_IN_URL.sub(rf"\1{_HIDDEN}@", line)


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
            line = (self.format(record) + "\n").encode(errors="backslashreplace")
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
    writer, handler = _Writer(descriptor, _RedactingFormatter(secrets, is_text)), _LossyQueue()
    thread = threading.Thread(target=handler.write_to, args=(writer,), name="log", daemon=True)
    thread.start()
    loggers = [(LOGGER, logging.INFO), (logging.getLogger("uvicorn.error"), logging.WARNING)]
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
    """Write one line; fields that are None are left out. People read ``text`` instead of the event and its fields."""
    known = {name: value for name, value in fields.items() if value is not None}
    LOGGER.log(level, event, extra={"fields": known, "text": text})


class RequestLog(Observer):
    """Writes a line when an answer begins and ends, and one for each HTTP response but those to polls.

    What polls of ``/health`` and ``/ready`` find, 503 included, is logged once, when it changes, by the process that changes it.
    """

    def __init__(self, with_prompts: bool = False, max_length: int | None = None) -> None:
        self._with_prompts = with_prompts  # and with parameters, and messages of refusals, which quote requests
        self._max_length = max_length  # characters of a prompt; None for all of it

    def began(self, generation: Generation) -> None:
        request, asked = generation.request, dict[str, Any]()
        if self._with_prompts:
            sampling = {name: value for name, value in to_builtins(request.sampling).items() if value != _DEFAULTS[name]}
            asked = {"prompt": generation.prompt_text[: self._max_length], "sampling": sampling, "method": request.method}
        log(
            "request", **self._ids(generation), endpoint=generation.endpoint, model=generation.model, stream=generation.stream,
            prompt_tokens=generation.prompt_tokens, max_tokens=request.sampling.max_tokens, **asked,
        )  # fmt: skip

    def ended(self, generation: Generation, reason: str, completion: Completion | None) -> None:
        metrics: dict[str, Any] = {} if completion is None else {"cached_tokens": completion.metrics.cached_tokens}
        log(
            "answer", **self._ids(generation), finish_reason=reason, prompt_tokens=generation.prompt_tokens,
            output_tokens=generation.output_tokens, seconds=round(time.perf_counter() - generation.started, 6), **metrics,
        )  # fmt: skip

    def responded(self, exchange: HttpExchange) -> None:
        if exchange.route in _POLLED and exchange.status in _POLL_ANSWERS:
            return
        log(
            "response", logging.ERROR if exchange.status == 500 else logging.INFO, request_id=exchange.request_id[:_ID_CHARS],
            method=exchange.method, route=exchange.route, status=exchange.status, seconds=round(exchange.seconds, 6),
            client=exchange.client, error=exchange.error if self._with_prompts or exchange.status >= 500 else None,
        )  # fmt: skip

    def _ids(self, generation: Generation) -> dict[str, Any]:
        request_id = generation.request_id[:_ID_CHARS]
        return {"request_id": request_id, "response_id": generation.response_id, "number": generation.number}
