"""``/api/chat`` and ``/api/generate``: from a body to an answer."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipedec.server.conversation import MessageReader, chat_of
from pipedec.server.delivery import ResponseHead, Usage, respond
from pipedec.server.errors import renamed_fields
from pipedec.server.front import Front, ServedRun
from pipedec.server.logprobs import LogprobWriter
from pipedec.server.ollama.protocol import (
    ERRORS,
    LINE_STREAM,
    OllamaBody,
    OllamaChatBody,
    OllamaChatResponse,
    OllamaGenerateBody,
    OllamaGenerateResponse,
)
from pipedec.server.ollama.translation import chat_of_messages, chat_of_prompt, own_names, raw_prompt
from pipedec.server.ollama.writers import ChatLines, TextLines
from pipedec.server.openai.completions import continuations_of


def ollama_routes(app: FastAPI, front: Front) -> None:
    @app.post("/api/chat", response_model=OllamaChatResponse, responses={**LINE_STREAM, **ERRORS}, tags=["ollama"])
    async def chat(body: OllamaChatBody, request: Request) -> Response:
        """Answer the last message of a conversation."""
        served, head = front.require(), ResponseHead("chat-", front.settings.check_model(body.model))
        model, logprobs = body.model or head.model, _logprobs(body, served)
        if not body.messages:
            return JSONResponse(ChatLines(head, model, MessageReader(None), None).loaded())
        with renamed_fields(own_names):
            chat = await chat_of(front, request, chat_of_messages(body), head, body.is_streamed)
        writer = ChatLines(head, model, chat.readers[0], logprobs)
        return await respond(request, chat.answers, writer, chat.usage, body.is_streamed)

    @app.post("/api/generate", response_model=OllamaGenerateResponse, responses={**LINE_STREAM, **ERRORS}, tags=["ollama"])
    async def generate(body: OllamaGenerateBody, request: Request) -> Response:
        """Answer one message, or continue a prompt."""
        served, head = front.require(), ResponseHead("generate-", front.settings.check_model(body.model))
        model, logprobs, reader = body.model or head.model, _logprobs(body, served), MessageReader(None)
        if not body.prompt:
            return JSONResponse(TextLines(head, model, reader, None).loaded())
        with renamed_fields(own_names):
            if body.raw:
                asked = await continuations_of(front, request, raw_prompt(body), head, body.is_streamed, None)
                answers, usage = asked.answers, Usage(asked.answers)
            else:
                chat = await chat_of(front, request, chat_of_prompt(body), head, body.is_streamed)
                answers, usage, reader = chat.answers, chat.usage, chat.readers[0]
        return await respond(request, answers, TextLines(head, model, reader, logprobs), usage, body.is_streamed)


def _logprobs(body: OllamaBody, served: ServedRun) -> LogprobWriter | None:
    return LogprobWriter(served.tokenizer, body.top_logprobs or 0, as_ids=False) if body.logprobs else None
