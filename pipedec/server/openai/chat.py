"""``/v1/chat/completions``: from a body to answers, and from answers to choices."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from pipedec.core.completion import Completion
from pipedec.server.answers import AnswerPart, tokens_of
from pipedec.server.bodies import BODY_ERRORS, STREAMED
from pipedec.server.conversation import MessageReader, chat_of, texts_of
from pipedec.server.delivery import ResponseHead, respond
from pipedec.server.front import Front, ServedRun
from pipedec.server.openai.choices import ChoicesWriter, ChoiceWriter
from pipedec.server.protocol import ChatBody, ChatResponse
from pipedec.text.parsers.parser import CallPart, Part

_ROLE = {"role": "assistant"}


class ChatWriter(ChoiceWriter):
    """A choice of ``/v1/chat/completions``. ``echoed``: text before the answer."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, body: ChatBody, served: ServedRun, reader: MessageReader, echoed: str) -> None:
        super().__init__(body, body.top_logprobs or 0 if body.logprobs else None, served)
        self._reader = reader
        self._echoed = echoed

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        delta = delta_of(self._reader.read_all(completion))
        calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
        content = self._echoed + delta.get("content", "")
        message = {"content": content if content or not calls else None, "refusal": None}
        message |= {name: delta[name] for name in ("reasoning_content", "reasoning") if name in delta}
        return {
            "index": index,
            "message": _ROLE | message | ({"tool_calls": calls} if calls else {}),
            "logprobs": None if self._logprobs is None else self._logprobs.chat(tokens_of(completion)),
            "finish_reason": self._reader.finish_reason(completion),
        } | self.more(completion)

    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        logprobs = self._logprobs.chat(part.tokens) if self._logprobs is not None and part.tokens else None
        delta = delta_of(self._reader.read(part))
        has_ids = self._has_ids and part.token_ids
        if not (delta or logprobs or part.completion or part.threads or has_ids):
            return None
        if not self._has_begun:
            self._has_begun = True
            first = {"content": self._echoed or (None if "tool_calls" in delta else "")}
            delta = _ROLE | first | delta | ({"content": self._echoed + delta["content"]} if "content" in delta else {})
        return {
            "index": part.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._reader.finish_reason(part.completion),
        } | self.more(part)


def delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """``content``, ``reasoning_content`` and ``tool_calls`` of the next parts of an answer, as far as there are any."""
    content, thoughts = texts_of(parts)
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if not isinstance(part, CallPart):
            continue
        call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
        if part.name is not None:
            call |= {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
            call["function"] = {"name": part.name, "arguments": ""}
        call["function"]["arguments"] += part.arguments
    return (
        ({"reasoning_content": thoughts, "reasoning": thoughts} if thoughts else {})
        | ({"content": content} if content else {})
        | ({"tool_calls": list(calls.values())} if calls else {})
    )


def chat_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/chat/completions", response_model=ChatResponse, responses={**STREAMED, **BODY_ERRORS}, tags=["chat"])
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer the last message of a conversation."""
        served, head = front.require(), ResponseHead("chatcmpl-", front.settings.check_model(body.model))
        chat = await chat_of(front, request, body, head, bool(body.stream))
        last = body.messages[-1]
        echoed = last.text if body.echo and last.role == "assistant" else ""
        writers = [ChatWriter(body, served, reader, echoed) for reader in chat.readers]
        more = {"prompt_token_ids": list(chat.prompt.token_ids)} if body.return_token_ids else {}
        return await respond(request, chat.answers, ChoicesWriter(head, body, writers, more), chat.usage, bool(body.stream))
