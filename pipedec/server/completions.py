"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from pipedec.core import Completion
from pipedec.server.answers import AnswerPart, finish_reason, text_of
from pipedec.server.asking import Asking, check_model
from pipedec.server.errors import bad_request
from pipedec.server.front import Front, ServedRun
from pipedec.server.logprobs import LogprobWriter, TokenLogprob
from pipedec.server.prompts import Prompt, tokenized
from pipedec.server.protocol import BODY_ERRORS, STREAMED, CompletionBody, CompletionResponse
from pipedec.server.responses import ChoiceWriter, respond
from pipedec.server.sampling import asked_of
from pipedec.server.structures import structure_of

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionWriter(ChoiceWriter):
    """Choices of ``/v1/completions``.

    Args:
        prompts: of all choices, in their order.
    """

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionBody, prompts: Sequence[Prompt], served: ServedRun) -> None:
        self._prompts = prompts
        self._echoes = bool(body.echo)
        self._has_logprobs = body.logprobs is not None
        self._waits = self._echoes and self._has_logprobs  # those of the prompt come with the completion
        self.num_dropped = 1 if is_empty(body) else 0
        as_ids = bool(body.return_tokens_as_token_ids)
        self._writers = [LogprobWriter(served.tokenizer, body.logprobs or 0, as_ids) for _ in prompts]
        self._has_begun = [False] * len(prompts)

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        tokens: list[TokenLogprob] = list(zip(completion.token_ids, completion.logprobs or (), strict=False))
        text = text_of(completion)
        if self.num_dropped:
            tokens, text = [], ""
        if self._echoes:
            prompt = self._prompts[index]
            tokens = [*zip(prompt.token_ids, completion.prompt_logprobs or (), strict=False), *tokens]
            text = prompt.text + text
        reason = "length" if self.num_dropped else finish_reason(completion)
        choice = self._choice(index, text, tokens, reason)
        return choice if completion.threads is None else choice | {"threads": completion.threads}

    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        if self._waits or self.num_dropped:
            return None if part.completion is None else self.choice(part.index, part.completion)
        text = part.text
        if self._echoes and not self._has_begun[part.index]:
            text = self._prompts[part.index].text + text
        self._has_begun[part.index] = True
        choice = self._choice(part.index, text, part.tokens, part.finish_reason)
        return choice | {"threads": [asdict(news) for news in part.threads]} if part.threads else choice

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        logprobs = self._writers[index].completion(tokens) if self._has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def is_empty(body: CompletionBody) -> bool:
    """Whether the client wants its prompt and no answer."""
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return bool(body.echo) and wanted == 0


def completions_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["completions"])

    @router.post("/v1/completions", response_model=CompletionResponse, responses={**STREAMED, **BODY_ERRORS})
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        served, model = front.require(), check_model(body.model, front.settings)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad_request("best_of is not supported: leave it out, or give the same as n", "best_of")
        asked = await asked_of(body, served, body.logprobs, bool(body.echo), structure_of(body))
        asking = Asking(front, request, model, "cmpl")
        add_special_tokens = body.add_special_tokens is not False
        prompts = await tokenized(body.prompt, served, front.settings.max_prompts, add_special_tokens)
        answers = asking.answers(prompts, asked, served, bool(body.stream), _DEFAULT_MAX_TOKENS)
        writer = CompletionWriter(body, [prompt for prompt in prompts for _ in range(asked.n)], served)
        return await respond(request, answers, body, asking.head, writer)

    return router
