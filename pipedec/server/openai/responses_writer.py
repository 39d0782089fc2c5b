"""An answer in the shape of ``/v1/responses``: items of an output, and the events by which they come.

A whole response is what the events of a stream add up to.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from pipedec.core.completion import Completion
from pipedec.server.answers import AnswerPart, TokenLogprob, finish_reason, tokens_of
from pipedec.server.conversation import MessageReader
from pipedec.server.delivery import ResponseHead, ResponseWriter, Usage, typed_event
from pipedec.server.errors import ApiError
from pipedec.server.front import ServedRun
from pipedec.server.logprobs import LogprobWriter
from pipedec.server.openai.responses_input import INPUT, OfferedTool, Tools, sealed
from pipedec.server.openai.responses_protocol import CLIENT_TOOLS, ENCRYPTED, LOGPROBS, ResponsesBody, ToolChoice
from pipedec.server.prompts import object_of
from pipedec.text.parsers.reader import CallPart, Part, Thought

_STATUS = {"stop": "completed", "length": "incomplete"}  # by finish reason
_CUT = "the server has ended this answer before it was complete: ask again"
Document = dict[str, Any]


class OutputItem(ABC):
    """An item while it is written. ``index``: its place in the output."""

    def __init__(self, prefix: str, index: int) -> None:
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.index = index
        self.text = ""

    @abstractmethod
    def document(self, status: str) -> Document:
        """The item as it stands."""

    def begin(self) -> Iterator[Document]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.document("in_progress")}

    @abstractmethod
    def add(self, text: str) -> Iterator[Document]:
        """Events of a piece."""

    def end(self, status: str) -> Iterator[Document]:
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.document(status)}

    def _event(self, name: str, **fields: Any) -> Document:
        return {"type": f"response.{name}", "item_id": self.id, "output_index": self.index, **fields}


class _TextItem(OutputItem):
    """With one part, whose type is ``part_type``."""

    part_type: str

    @abstractmethod
    def part(self) -> Document:
        """The part as it stands."""

    def begin(self) -> Iterator[Document]:
        yield from super().begin()
        yield self._event("content_part.added", content_index=0, part=self.part())

    def add(self, text: str, **more: Any) -> Iterator[Document]:
        self.text += text
        yield self._event(f"{self.part_type}.delta", content_index=0, delta=text, **more)

    def end(self, status: str, **more: Any) -> Iterator[Document]:
        yield self._event(f"{self.part_type}.done", content_index=0, text=self.text, **more)
        yield self._event("content_part.done", content_index=0, part=self.part())
        yield from super().end(status)

    def _content(self, status: str) -> list[Document]:
        return [] if status == "in_progress" else [self.part()]


class MessageItem(_TextItem):
    part_type = "output_text"

    def __init__(self, index: int) -> None:
        super().__init__("msg", index)
        self.logprobs: list[Document] = []

    def part(self) -> Document:
        return {"type": self.part_type, "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def document(self, status: str) -> Document:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": self._content(status)}

    def add(self, text: str, **more: Any) -> Iterator[Document]:
        self.logprobs += more.setdefault("logprobs", [])
        yield from super().add(text, **more)

    def end(self, status: str, **more: Any) -> Iterator[Document]:
        yield from super().end(status, logprobs=self.logprobs)


class ReasoningItem(_TextItem):
    """There is no summary: nothing sums thoughts up here."""

    part_type = "reasoning_text"

    def __init__(self, index: int, is_sealed: bool) -> None:
        super().__init__("rs", index)
        self._is_sealed = is_sealed

    def part(self) -> Document:
        return {"type": self.part_type, "text": self.text}

    def document(self, status: str) -> Document:
        given = {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": self._content(status)}
        return given | ({"encrypted_content": sealed(self.text)} if self._is_sealed and status != "in_progress" else {})


class CallItem(OutputItem):
    """A call of a function, or of a custom tool, whose input arrives as the argument of a function and comes as one piece."""

    def __init__(self, index: int, name: str, offered: OfferedTool | None) -> None:
        self._is_custom = offered is not None and offered.is_custom
        super().__init__("ctc" if self._is_custom else "fc", index)
        self._call_id = f"call_{uuid.uuid4().hex}"
        self._name = {"name": name}
        if offered is not None:
            self._name = {"name": str(offered.tool.name)} | ({"namespace": offered.namespace} if offered.namespace else {})
        self._kind, self._field, self._stem = "function_call", "arguments", "function_call_arguments"
        if self._is_custom:
            self._kind, self._field, self._stem = "custom_tool_call", INPUT, "custom_tool_call_input"

    def document(self, status: str) -> Document:
        given = {"id": self.id, "type": self._kind, "status": status, "call_id": self._call_id, **self._name}
        return given | {self._field: self._given()}

    def add(self, text: str) -> Iterator[Document]:
        self.text += text
        if text and not self._is_custom:
            yield self._event(f"{self._stem}.delta", delta=text)

    def end(self, status: str) -> Iterator[Document]:
        if self._is_custom:
            yield self._event(f"{self._stem}.delta", delta=self._given())
        yield self._event(f"{self._stem}.done", **{self._field: self._given()})
        yield from super().end(status)

    def _given(self) -> str:
        """The text of the field; where a model has not written the object that it should, its own words."""
        if not self._is_custom:
            return self.text
        value = (object_of(self.text) or {}).get(INPUT)
        return value if isinstance(value, str) else self.text


class ItemsWriter(ResponseWriter):
    """Writes the one answer of a request. ``keep`` gets the response when it is complete."""

    def __init__(
        self, head: ResponseHead, body: ResponsesBody, tools: Tools, served: ServedRun, reader: MessageReader,
        keep: Callable[[Document], None] | None,
    ) -> None:  # fmt: skip
        self._head, self._body, self._tools, self._reader, self._keep = head, body, tools, reader, keep
        include = body.include or ()
        self._is_sealed = ENCRYPTED in include
        shows_logprobs = LOGPROBS in include or body.top_logprobs is not None
        as_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = LogprobWriter(served.tokenizer, body.top_logprobs or 0, as_ids) if shows_logprobs else None
        self._echo = _echo(body, served) | {"store": keep is not None}
        self._waiting: list[TokenLogprob] = []  # tokens whose text is not there yet
        self._items: list[OutputItem] = []
        self._done: list[Document] = []
        self._completion: Completion | None = None
        self._num_events = 0

    def document(self, completions: Sequence[Completion], usage: Usage) -> Document:
        completion = completions[0]
        list(self._written(self._reader.read_all(completion), tokens_of(completion), usage.thought_end))
        list(self._closed(_STATUS.get(finish_reason(completion), "incomplete")))
        return self._ended(completion, usage)

    def begin(self, usage: Usage) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._lifecycle(name, self._response("in_progress"))

    def events(self, part: AnswerPart, usage: Usage) -> Iterator[bytes]:
        self._completion = part.completion
        for one in self._written(self._reader.read(part), part.tokens, usage.thought_end):
            yield self._numbered(one)

    def end(self, usage: Usage) -> Iterator[bytes]:
        assert self._completion is not None, "the last part has it"
        for one in self._closed(_STATUS.get(finish_reason(self._completion), "incomplete")):
            yield self._numbered(one)
        response = self._ended(self._completion, usage)
        yield self._lifecycle(response["status"], response)

    def failed(self, error: ApiError) -> Iterator[bytes]:
        code = "server_error" if error.status_code >= 500 else "invalid_prompt"
        response = self._response("failed") | {"error": {"code": code, "message": error.detail}}
        yield self._lifecycle("failed", response)

    def _written(self, parts: Sequence[Part], tokens: Sequence[TokenLogprob], thought_end: int | None) -> Iterator[Document]:
        """Events of further parts, and of tokens that may have come before their text. Tokens of thoughts are not shown."""
        self._waiting += tokens if self._logprobs is not None else ()
        ends = [place for place, (token, _) in enumerate(self._waiting) if token == thought_end]
        del self._waiting[: ends[-1] + 1 if ends else 0]
        for part in parts:
            if isinstance(part, CallPart):
                if part.name is not None:
                    yield from self._begun(CallItem(len(self._items), part.name, self._tools.offered.get(part.name)))
                yield from self._items[-1].add(part.arguments)
            elif isinstance(part, Thought):
                if not isinstance(self._open, ReasoningItem):
                    yield from self._begun(ReasoningItem(len(self._items), self._is_sealed))
                yield from self._items[-1].add(part.text)
            else:
                if not isinstance(self._open, MessageItem):
                    yield from self._begun(MessageItem(len(self._items)))
                yield from self._message_text(part)
        if parts and isinstance(parts[-1], Thought):
            self._waiting.clear()

    def _message_text(self, text: str) -> Iterator[Document]:
        shown = [] if self._logprobs is None else self._logprobs.chat(self._waiting)["content"]
        self._waiting.clear()
        message = self._items[-1]
        assert isinstance(message, MessageItem)
        yield from message.add(text, logprobs=shown)

    @property
    def _open(self) -> OutputItem | None:
        return self._items[-1] if len(self._items) > len(self._done) else None

    def _begun(self, item: OutputItem) -> Iterator[Document]:
        yield from self._closed("completed")
        self._items.append(item)
        yield from item.begin()

    def _closed(self, status: str) -> Iterator[Document]:
        if (item := self._open) is None:
            return
        if isinstance(item, MessageItem) and self._waiting:
            yield from self._message_text("")
        yield from item.end(status)
        self._done.append(item.document(status))

    def _ended(self, completion: Completion, usage: Usage) -> Document:
        """The response when the answer is complete, which is kept unless the server has cut it."""
        status = _STATUS.get(finish_reason(completion))
        if status is None:
            failed = {"error": {"code": "server_error", "message": _CUT}, "usage": _usage(usage)}
            return self._response("failed") | failed
        reason = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        response = self._response(status) | reason | {"completed_at": int(time.time()), "usage": _usage(usage)}
        if self._keep is not None:
            self._keep(response)
        return response

    def _response(self, status: str) -> Document:
        head = self._head
        return {
            "id": head.id, "object": "response", "created_at": head.created, "completed_at": None, "status": status,
            "error": None, "incomplete_details": None, "model": head.model, "output": list(self._done), "usage": None,
        } | self._echo  # fmt: skip

    def _lifecycle(self, name: str, response: Document) -> bytes:
        return self._numbered({"type": f"response.{name}", "response": response})

    def _numbered(self, one: Document) -> bytes:
        self._num_events += 1
        return typed_event({**one, "sequence_number": self._num_events - 1})


def _usage(usage: Usage) -> Document:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},  # which would cost something
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _echo(body: ResponsesBody, served: ServedRun) -> Document:
    """The fields of the request, with the values that are used where it gives none, and without tools that are left out."""
    form, choice, defaults = body.text and body.text.format, body.tool_choice, served.defaults.values
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": defaults["temperature"] if body.temperature is None else body.temperature,
        "text": {"format": _given(form) if form else {"type": "text"}},
        "tool_choice": _given(choice) if isinstance(choice, ToolChoice) else choice or "auto",
        "tools": [_given(tool) for tool in body.tools or () if tool.type in CLIENT_TOOLS],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults["top_p"] if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _given(model: BaseModel) -> Document:
    return model.model_dump(exclude_unset=True, by_alias=True)
