"""``/v1/completions``: from a body to answers, and from answers to choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from pipedec.core.completion import Completion
from pipedec.server.answers import AnswerPart, Generations, TokenLogprob, finish_reason, text_of, tokens_of
from pipedec.server.bodies import BODY_ERRORS, STREAMED
from pipedec.server.delivery import ResponseHead, Usage, answers_of, respond, unless_gone
from pipedec.server.errors import bad_request
from pipedec.server.front import Front, ServedRun
from pipedec.server.logprobs import LogprobWriter
from pipedec.server.openai.choices import ChoicesWriter, ChoiceWriter
from pipedec.server.prompts import Prompt, num_kept, tokenized
from pipedec.server.protocol import CompletionBody, CompletionResponse
from pipedec.server.sampling import asked_of
from pipedec.server.structures import structure_of

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionWriter(ChoiceWriter):
    """A choice of ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    num_dropped = 0  # tokens at the end of the answer that are not the client's

    def __init__(self, body: CompletionBody, prompt: Prompt, served: ServedRun) -> None:
        super().__init__(body, body.logprobs, served)
        self._prompt = prompt
        self._echoed = prompt if body.echo else None
        self._of_prompt = None if body.prompt_logprobs is None else LogprobWriter(served.tokenizer, body.prompt_logprobs, False)
        self._waits = bool(body.echo) and body.logprobs is not None  # those of the prompt come with the completion
        self.num_dropped = 1 if body.echo and body.max_tokens_asked == 0 else 0  # the client wants its prompt and no answer

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        tokens, text = tokens_of(completion), text_of(completion)
        if self.num_dropped:
            tokens, text = [], ""
        if self._echoed is not None:
            tokens = [*zip(self._echoed.token_ids, completion.prompt_logprobs or (), strict=False), *tokens]
            text = self._echoed.text + text
        reason = "length" if self.num_dropped else finish_reason(completion)
        return self._choice(index, text, tokens, reason) | self.more(completion)

    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        if self._waits or self.num_dropped:
            return None if part.completion is None else self.choice(part.index, part.completion)
        text = part.text if self._echoed is None or self._has_begun else self._echoed.text + part.text
        return self._choice(part.index, text, part.tokens, part.finish_reason) | self.more(part)

    def more(self, answer: AnswerPart | Completion) -> dict[str, Any]:
        found = super().more(answer)
        if self._has_ids:
            ids: dict[str, Any] = {"token_ids": []} if self.num_dropped else {}
            found |= ids if self._has_begun else ids | {"prompt_token_ids": list(self._prompt.token_ids)}
        self._has_begun = True
        completion = answer if isinstance(answer, Completion) else answer.completion
        if self._of_prompt is not None and completion is not None:
            known = list(zip(self._prompt.token_ids, completion.prompt_logprobs or (), strict=False))
            found["prompt_logprobs"] = self._of_prompt.prompt(known)
        return found

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.completion(tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclass(frozen=True)
class Continuations:
    """Prompts with their answers, which are not yet submitted."""

    prompts: Sequence[Prompt]
    answers: Generations
    n: int  # answers of each prompt


async def continuations_of(
    front: Front, request: Request, body: CompletionBody, head: ResponseHead, is_streamed: bool, max_tokens: int | None
) -> Continuations:
    """``max_tokens``: of an answer, if the body has none; None for all that fit. Raises ApiError for what cannot be answered."""
    served = front.require()
    of_prompt = body.logprobs if body.echo else None
    if of_prompt is not None and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs goes without echo and logprobs, which show the same", "prompt_logprobs")
    checked = asked_of(
        body, served, body.logprobs, max_tokens, body.prompt_logprobs if of_prompt is None else of_prompt,
        structure_of(body),
    )  # fmt: skip
    asked = await unless_gone(request, checked)
    reading = tokenized(
        body.prompt, served, front.settings.max_prompts, body.add_special_tokens is not False, num_kept(body, served)
    )
    prompts = await unless_gone(request, reading)
    return Continuations(prompts, answers_of(front, request, head, prompts, asked, is_streamed), asked.n)


def completions_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", response_model=CompletionResponse, responses={**STREAMED, **BODY_ERRORS}, tags=["completions"])
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        served, model = front.require(), front.settings.check_model(body.model)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad_request("best_of is not supported: leave it out, or give the same as n", "best_of")
        head, is_streamed = ResponseHead("cmpl-", model), bool(body.stream)
        asked = await continuations_of(front, request, body, head, is_streamed, _DEFAULT_MAX_TOKENS)
        writers = [CompletionWriter(body, prompt, served) for prompt in asked.prompts for _ in range(asked.n)]
        usage = Usage(asked.answers, asked.n, writers[0].num_dropped)
        return await respond(request, asked.answers, ChoicesWriter(head, body, writers), usage, is_streamed)
