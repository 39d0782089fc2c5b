"""``/v1/completions`` and ``/v1/chat/completions``: from a body to answers, and from answers to choices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from pipedec.core.completion import Completion
from pipedec.server.answers import AnswerPart, TokenLogprob, finish_reason, text_of
from pipedec.server.errors import bad_request
from pipedec.server.front import Front, ServedRun
from pipedec.server.prompts import READERS, Prompt, rendered, tokenized
from pipedec.server.protocol import BODY_ERRORS, STREAMED, ChatBody, ChatResponse, CompletionBody, CompletionResponse
from pipedec.server.responses import ChoiceWriter, ResponseHead, answers_of, respond, threads_of, unless_gone
from pipedec.server.sampling import asked_of
from pipedec.server.structures import CallWriter, ToolUse, structure_of, tool_use_of

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_ROLE = {"role": "assistant"}


class CompletionWriter(ChoiceWriter):
    """A choice of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionBody, prompt: Prompt, served: ServedRun) -> None:
        super().__init__(body, body.logprobs, served)
        self._echoed = prompt if body.echo else None
        self._waits = bool(body.echo) and body.logprobs is not None  # those of the prompt come with the completion
        self.num_dropped = 1 if body.echo and body.max_tokens_asked == 0 else 0  # the client wants its prompt and no answer

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        tokens: list[TokenLogprob] = list(zip(completion.token_ids, completion.logprobs or (), strict=False))
        text = text_of(completion)
        if self.num_dropped:
            tokens, text = [], ""
        if self._echoed is not None:
            tokens = [*zip(self._echoed.token_ids, completion.prompt_logprobs or (), strict=False), *tokens]
            text = self._echoed.text + text
        reason = "length" if self.num_dropped else finish_reason(completion)
        return self._choice(index, text, tokens, reason) | threads_of(completion)

    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        if self._waits or self.num_dropped:
            return None if part.completion is None else self.choice(part.index, part.completion)
        text = part.text if self._echoed is None or self._has_begun else self._echoed.text + part.text
        self._has_begun = True
        return self._choice(part.index, text, part.tokens, part.finish_reason) | threads_of(part)

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.completion(tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def completions_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", response_model=CompletionResponse, responses={**STREAMED, **BODY_ERRORS}, tags=["completions"])
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        served, model = front.require(), front.settings.check_model(body.model)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad_request("best_of is not supported: leave it out, or give the same as n", "best_of")
        checked = asked_of(body, served, body.logprobs, _DEFAULT_MAX_TOKENS, bool(body.echo), structure_of(body))
        asked = await unless_gone(request, checked)
        head = ResponseHead("cmpl", model)
        add_special_tokens = body.add_special_tokens is not False
        reading = tokenized(body.prompt, served, front.settings.max_prompts, add_special_tokens)
        prompts = await unless_gone(request, reading)
        answers = answers_of(front, request, head, prompts, asked, bool(body.stream))
        writers = [CompletionWriter(body, prompt, served) for prompt in prompts for _ in range(asked.n)]
        return await respond(request, answers, body, head, writers)


class ChatWriter(ChoiceWriter):
    """A choice of ``/v1/chat/completions``; ``use``: what the answer may call."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, body: ChatBody, served: ServedRun, use: ToolUse | None) -> None:
        super().__init__(body, body.top_logprobs or 0 if body.logprobs else None, served)
        self._calls = None if use is None else CallWriter(use)

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        tokens = list(zip(completion.token_ids, completion.logprobs or (), strict=False))
        text = text_of(completion)
        return {
            "index": index,
            "message": _ROLE | ({"content": text, "refusal": None} if self._calls is None else self._calls.message(text)),
            "logprobs": None if self._logprobs is None else self._logprobs.chat(tokens),
            "finish_reason": self._finish_reason(finish_reason(completion)),
        } | threads_of(completion)

    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        logprobs = self._logprobs.chat(part.tokens) if self._logprobs is not None and part.tokens else None
        if self._calls is not None:
            delta = self._calls.delta(part.text, part.completion is not None)
        else:
            delta = {"content": part.text} if part.text else {}
        if not delta and logprobs is None and part.completion is None and not part.threads:
            return None
        if not self._has_begun:
            self._has_begun = True
            delta = _ROLE | {"content": None if "tool_calls" in delta else ""} | delta
        return {
            "index": part.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(part.finish_reason),
        } | threads_of(part)

    def _finish_reason(self, reason: str | None) -> str | None:
        has_called = self._calls is not None and self._calls.has_called
        return "tool_calls" if reason == "stop" and has_called else reason


def chat_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/chat/completions", response_model=ChatResponse, responses={**STREAMED, **BODY_ERRORS}, tags=["chat"])
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """Answer the last message of a conversation."""
        served, model = front.require(), front.settings.check_model(body.model)
        use, most_probable = tool_use_of(body, served.tokenizer), body.top_logprobs or 0
        if most_probable and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        logprobs, structure = most_probable if body.logprobs else None, structure_of(body)
        if structure is not None and use is not None:
            raise bad_request(f"{structure.field} goes without tools, or with tool_choice none", structure.field)
        checked = asked_of(
            body, served, logprobs, served.defaults.max_tokens, structure=structure if use is None else use.structure
        )
        asked = await unless_gone(request, checked)
        head = ResponseHead("chatcmpl", model)
        variables = dict(body.chat_template_kwargs or {})
        own = {"threads": body.threads, "reasoning_effort": body.reasoning_effort}
        variables |= {name: value for name, value in own.items() if value is not None}
        tools = None if use is None else use.shown
        reading = partial(rendered, body.messages, served, body.add_generation_prompt is not False, variables, tools)
        prompt = await unless_gone(request, READERS.run(reading))
        answers = answers_of(front, request, head, [prompt], asked, bool(body.stream))
        writers = [ChatWriter(body, served, use) for _ in range(asked.n)]
        return await respond(request, answers, body, head, writers)
