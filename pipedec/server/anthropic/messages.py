"""``/v1/messages``: Anthropic's API of conversations, answered as chats are; and the blocks and events of its responses."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from pipedec.core.completion import Completion
from pipedec.server.answers import AnswerPart
from pipedec.server.anthropic.protocol import (
    ConversationBody,
    MessageResponse,
    MessagesBody,
    MessagesErrorResponse,
    MessageTokensCount,
)
from pipedec.server.anthropic.translation import chat_body_of
from pipedec.server.bodies import body_errors, streamed
from pipedec.server.conversation import MessageReader, arguments_of, chat_of, prompt_of
from pipedec.server.delivery import ResponseHead, ResponseWriter, Usage, respond, typed_event
from pipedec.server.errors import ApiError, renamed_fields
from pipedec.server.front import Front
from pipedec.server.structures import tool_use_of
from pipedec.text.parsers.parser import CallPart, Part, Thought

MESSAGES = "/v1/messages"
SIGNATURE = "unsigned"  # of thoughts; clients leave out thoughts without one when they send a conversation back
_ERRORS = body_errors(MessagesErrorResponse)
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}
_PING = json.dumps({"type": "ping"})
_NAMES = {
    "response_format": "output_config.format",
    "function.parameters": "input_schema",
    "tool_choice to required or to a function": "tool_choice to any or to a tool",
}


def event(kind: str, **fields: Any) -> bytes:
    """An event of a stream."""
    return typed_event({"type": kind, **fields})


class Content:
    """The blocks of an answer, and the events that make them.

    The input of a tool comes in one event, when the call is complete: what a model has written as no JSON object becomes one.

    Attributes:
        blocks: all are complete after ``end``.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open: object = None  # identifies the last block, while it grows
        self._arguments = ""  # of the last call

    def add(self, part: Part) -> Iterator[bytes]:
        """The events of a further part."""
        kind = part.index if isinstance(part, CallPart) else type(part)
        if kind != self._open:
            yield from self.end()
            self._open = kind
            self.blocks.append(_begun(part))
            yield event("content_block_start", index=self._index, content_block=self.blocks[-1])
        if isinstance(part, CallPart):
            self._arguments += part.arguments
        elif isinstance(part, Thought):
            self.blocks[-1]["thinking"] += part.text
            yield self._delta("thinking_delta", thinking=part.text)
        else:
            self.blocks[-1]["text"] += part
            yield self._delta("text_delta", text=part)

    def end(self) -> Iterator[bytes]:
        """The events that complete the last block."""
        if self._open is None:
            return
        block, self._open = self.blocks[-1], None
        if block["type"] == "tool_use":
            block["input"], self._arguments = arguments_of(self._arguments), ""
            yield self._delta("input_json_delta", partial_json=json.dumps(block["input"], ensure_ascii=False))
        elif block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._delta("signature_delta", signature=SIGNATURE)
        yield event("content_block_stop", index=self._index)

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _delta(self, kind: str, **fields: str) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _begun(part: Part) -> dict[str, Any]:
    if isinstance(part, CallPart):
        return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": part.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""} if isinstance(part, Thought) else {"type": "text", "text": ""}


class MessageWriter(ResponseWriter):
    """The message of ``/v1/messages``. ``max_tokens``: that the client has asked for."""

    def __init__(self, head: ResponseHead, reader: MessageReader, max_tokens: int) -> None:
        self._head = head
        self._reader = reader
        self._max_tokens = max_tokens
        self._content = Content()
        self._completion: Completion | None = None

    @property
    def ping(self) -> ServerSentEvent:
        return ServerSentEvent(_PING, event="ping", sep="\n")

    def document(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        [completion] = completions
        for part in self._reader.read_all(completion):
            list(self._content.add(part))
        list(self._content.end())
        return self._message(usage) | {"content": self._content.blocks} | self._stop(completion)

    def begin(self, usage: Usage) -> Iterable[bytes]:
        return event("message_start", message=self._message(usage)), event("ping")

    def events(self, part: AnswerPart, usage: Usage) -> Iterator[bytes]:
        for piece in self._reader.read(part):
            yield from self._content.add(piece)
        self._completion = part.completion

    def end(self, usage: Usage) -> Iterator[bytes]:
        yield from self._content.end()
        assert self._completion is not None, "the last part has it"
        yield event("message_delta", delta=self._stop(self._completion), usage=_usage(usage))
        yield event("message_stop")

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return (event("error", error=error.body(MESSAGES)["error"]),)

    def _message(self, usage: Usage) -> dict[str, Any]:
        head = {"id": self._head.id, "type": "message", "role": "assistant", "model": self._head.model}
        return head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}

    def _stop(self, completion: Completion) -> dict[str, str | None]:
        if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        reason = _STOPS[self._reader.finish_reason(completion) or "stop"]
        if reason == "max_tokens" and len(completion.token_ids) < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    return found if usage.thought_end is None else found | {"output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}}


def _own_names(text: str) -> str:
    """The text with this API's names of fields."""
    for name, own in _NAMES.items():
        text = text.replace(name, own)
    return text


def messages_routes(app: FastAPI, front: Front) -> None:
    """``/v1/messages`` and ``/v1/messages/count_tokens``."""

    def served_name(body: ConversationBody) -> str:
        front.require()
        try:
            return front.settings.check_model(body.model)
        except ApiError as error:
            remedy = "ask for it (Claude Code: ANTHROPIC_MODEL), or serve it by this name, too (--served-model-name)"
            raise ApiError(404, f"{error.detail}; {remedy}", "model") from None

    @app.post(
        MESSAGES,
        response_model=MessageResponse,
        responses={**streamed("Events from message_start to message_stop, or error."), **_ERRORS},
        tags=["messages"],
    )
    async def create_message(body: MessagesBody, request: Request) -> Response:
        """Answer the last message of a conversation, as Anthropic's API does."""
        head = ResponseHead("msg_", served_name(body))
        with renamed_fields(_own_names):
            chat_body = chat_body_of(body, front.reasoning is not None)
            chat = await chat_of(front, request, chat_body, head, bool(body.stream), body.max_tokens)
        writer = MessageWriter(head, chat.readers[0], body.max_tokens)
        return await respond(request, chat.answers, writer, chat.usage, bool(body.stream))

    @app.post(f"{MESSAGES}/count_tokens", responses=_ERRORS, tags=["messages"])
    async def count_tokens(body: ConversationBody, request: Request) -> MessageTokensCount:
        """The tokens of the prompt that a conversation makes."""
        served_name(body)
        with renamed_fields(_own_names):
            chat_body = chat_body_of(body, front.reasoning is not None)
            prompt = await prompt_of(front, request, chat_body, tool_use_of(chat_body, front))
        return MessageTokensCount(input_tokens=len(prompt.token_ids))
