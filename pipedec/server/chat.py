"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from pipedec.core import MAX_LOGPROBS, Completion
from pipedec.server.answers import AnswerPart, finish_reason, text_of
from pipedec.server.asking import Asking, check_model
from pipedec.server.errors import bad_request
from pipedec.server.front import Front, ServedRun
from pipedec.server.logprobs import LogprobWriter
from pipedec.server.prompts import rendered
from pipedec.server.protocol import BODY_ERRORS, STREAMED, ChatBody, ChatResponse
from pipedec.server.responses import ChoiceWriter, respond
from pipedec.server.sampling import asked_of
from pipedec.server.structures import Structure, structure_of
from pipedec.server.tools import CallWriter, ToolUse, tool_use_of

_ROLE = {"role": "assistant"}


class ChatWriter(ChoiceWriter):
    """Choices of ``/v1/chat/completions``.

    Args:
        use: what answers may call; None for nothing.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, body: ChatBody, n: int, served: ServedRun, use: ToolUse | None) -> None:
        self._has_logprobs = bool(body.logprobs)
        as_ids = bool(body.return_tokens_as_token_ids)
        self._writers = [LogprobWriter(served.tokenizer, body.top_logprobs or 0, as_ids) for _ in range(n)]
        self._calls = [None if use is None else CallWriter(use) for _ in range(n)]
        self._has_begun = [False] * n

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        tokens = list(zip(completion.token_ids, completion.logprobs or (), strict=False))
        text, calls = text_of(completion), self._calls[index]
        choice = {
            "index": index,
            "message": _ROLE | ({"content": text, "refusal": None} if calls is None else calls.message(text)),
            "logprobs": self._writers[index].chat(tokens) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(index, finish_reason(completion)),
        }
        return choice if completion.threads is None else choice | {"threads": completion.threads}

    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        tokens = part.tokens if self._has_logprobs else ()
        delta = self._delta(part)
        if not delta and not tokens and part.completion is None and not part.threads:
            return None
        if not self._has_begun[part.index]:
            self._has_begun[part.index] = True
            delta = _ROLE | {"content": None if "tool_calls" in delta else ""} | delta
        choice = {
            "index": part.index,
            "delta": delta,
            "logprobs": self._writers[part.index].chat(tokens) if tokens else None,
            "finish_reason": self._finish_reason(part.index, part.finish_reason),
        }
        return choice | {"threads": [asdict(news) for news in part.threads]} if part.threads else choice

    def _delta(self, part: AnswerPart) -> dict[str, Any]:
        calls = self._calls[part.index]
        if calls is not None:
            return calls.delta(part.text, part.completion is not None)
        return {"content": part.text} if part.text else {}

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        calls = self._calls[index]
        return "tool_calls" if reason == "stop" and calls is not None and calls.has_called else reason


def _num_logprobs(body: ChatBody) -> int | None:
    most_probable = body.top_logprobs or 0
    if not 0 <= most_probable <= MAX_LOGPROBS:
        raise bad_request(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {most_probable}", "top_logprobs")
    if most_probable and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return most_probable if body.logprobs else None


def _structure(body: ChatBody, use: ToolUse | None) -> Structure | None:
    """Raises ApiError if an answer would have to be two things."""
    structure = structure_of(body)
    if structure is not None and use is not None:
        raise bad_request(f"{structure.field} goes without tools, or with tool_choice none", structure.field)
    return structure if use is None else use.structure


def chat_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions", response_model=ChatResponse, responses={**STREAMED, **BODY_ERRORS})
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer the last message of a conversation."""
        served, model = front.require(), check_model(body.model, front.settings)
        if (body.model_extra or {}).get("echo"):
            raise bad_request("echo is not supported here: use /v1/completions", "echo")
        use = tool_use_of(body, served.tokenizer)
        asked = await asked_of(body, served, _num_logprobs(body), structure=_structure(body, use))
        asking = Asking(front, request, model, "chatcmpl")
        variables = dict(body.chat_template_kwargs or {})
        own = {"threads": asked.dialect and asked.dialect.name, "reasoning_effort": body.reasoning_effort}
        variables |= {name: value for name, value in own.items() if value is not None}
        tools = None if use is None else use.shown
        prompt = await rendered(body.messages, served, body.add_generation_prompt is not False, variables, tools)
        answers = asking.answers([prompt], asked, served, bool(body.stream), served.defaults.max_tokens)
        return await respond(request, answers, body, asking.head, ChatWriter(body, asked.n, served, use))

    return router
