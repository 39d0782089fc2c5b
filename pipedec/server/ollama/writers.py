"""From answers to Ollama's responses: one document, or a line of JSON for each part."""

from __future__ import annotations

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from pipedec.core.completion import Completion
from pipedec.server.answers import AnswerPart, TokenLogprob, tokens_of
from pipedec.server.conversation import MessageReader, arguments_of, texts_of
from pipedec.server.delivery import LINES, ResponseHead, ResponseWriter, Usage
from pipedec.server.errors import ApiError
from pipedec.server.logprobs import LogprobWriter
from pipedec.text.parsers.parser import CallPart, Part

_NANOSECONDS = 1_000_000_000


def moment(seconds: float | None = None) -> str:
    """A time in seconds since 1970, by default the present, as RFC 3339 has it."""
    return (datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)).isoformat().replace("+00:00", "Z")


class LineWriter(ResponseWriter):
    """The only answer of a request. ``model``: as the client has named it."""

    media_type = LINES

    def __init__(self, head: ResponseHead, model: str, reader: MessageReader, logprobs: LogprobWriter | None) -> None:
        self._head = head
        self._model = model
        self._reader = reader
        self._logprobs = logprobs
        self._open: dict[int, tuple[str, str]] = {}  # name and arguments of calls that are not complete

    @abstractmethod
    def fields(self, content: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The part of a response that is the answer."""

    def loaded(self) -> dict[str, Any]:
        """The response to a request for nothing but that the model is loaded, as it is."""
        return self._response(self.fields("", "", ())) | {"done": True, "done_reason": "load"}

    def document(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        (completion,) = completions
        answer = self._fields(self._reader.read_all(completion), True)
        return self._response(answer) | self._shown(tokens_of(completion)) | self._ended(completion, usage)

    def events(self, part: AnswerPart, usage: Usage) -> Iterator[bytes]:
        parts, is_last = self._reader.read(part), part.completion is not None
        answer, shown = self._fields(parts, is_last), self._shown(part.tokens)
        if answer != self.fields("", "", ()) or shown.get("logprobs"):
            yield _line(self._response(answer) | shown)
        if part.completion is not None:
            yield _line(self._response(self.fields("", "", ())) | self._ended(part.completion, usage))

    def end(self, usage: Usage) -> Iterator[bytes]:
        yield from ()

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield _line({"error": error.detail})

    def _response(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "created_at": moment(), **answer, "done": False}

    def _fields(self, parts: Sequence[Part], is_last: bool) -> dict[str, Any]:
        return self.fields(*texts_of(parts), self._calls(parts, is_last))

    def _calls(self, parts: Sequence[Part], is_last: bool) -> list[dict[str, Any]]:
        """The calls that are complete with these parts."""
        for part in parts:
            if isinstance(part, CallPart):
                name, arguments = self._open.get(part.index, (part.name or "", ""))
                self._open[part.index] = (name, arguments + part.arguments)
        complete = sorted(self._open) if is_last else sorted(self._open)[:-1]
        return [_call(index, *self._open.pop(index)) for index in complete]

    def _shown(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {} if self._logprobs is None or not tokens else {"logprobs": self._logprobs.chat(tokens)["content"]}

    def _ended(self, completion: Completion, usage: Usage) -> dict[str, Any]:
        reason, metrics = self._reader.finish_reason(completion), completion.metrics
        return {
            "done": True,
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": _nanoseconds(time.perf_counter() - self._head.started),
            "load_duration": _nanoseconds(metrics.queue_seconds or 0.0),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(metrics.prefill_seconds),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(metrics.decode_seconds),
        }


class ChatLines(LineWriter):
    """The answer as a message."""

    def fields(self, content: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        return {"message": message | _given(thinking=thinking, tool_calls=list(calls))}


class TextLines(LineWriter):
    """The answer as text. Nothing in it is a call: it has no tools."""

    def fields(self, content: str, thinking: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"response": content} | _given(thinking=thinking)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex}", "function": {"index": index, "name": name, "arguments": arguments_of(arguments)}}


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it."""
    return max(1, round(seconds * _NANOSECONDS))
