"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from pipedec.server.asking import check_model
from pipedec.server.errors import bad_request
from pipedec.server.front import Front, ServedRun
from pipedec.server.prompts import Prompt, check_token_ids, rendered, tokenized
from pipedec.server.protocol import BODY_ERRORS, DetokenizeBody, DetokenizeResponse, TokenizeBody, TokenizeResponse
from pipedec.server.tools import shown


def tokens_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", response_model_exclude_unset=True, responses=BODY_ERRORS)
    async def tokenize(body: TokenizeBody) -> TokenizeResponse:
        """Token ids of a prompt, or of messages after the chat template."""
        served = front.require()
        check_model(body.model, front.settings)
        prompt = await _prompt(body, served)
        tokens = list(prompt.token_ids)
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": served.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            found["token_strs"] = [served.tokenizer.token(token) for token in tokens]
        return TokenizeResponse(**found)

    @router.post("/detokenize", responses=BODY_ERRORS)
    async def detokenize(body: DetokenizeBody) -> DetokenizeResponse:
        """The text of token ids."""
        served = front.require()
        check_model(body.model, front.settings)
        check_token_ids(body.tokens, served.tokenizer, "tokens")
        return DetokenizeResponse(prompt=served.tokenizer.decode(body.tokens, skip_special_tokens=False))

    return router


async def _prompt(body: TokenizeBody, served: ServedRun) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.messages is not None:
        begins_answer = body.add_generation_prompt is not False
        tools = shown(body.tools) if body.tools else None
        return await rendered(body.messages, served, begins_answer, body.chat_template_kwargs or {}, tools)
    assert body.prompt is not None
    return (await tokenized(body.prompt, served, 1, body.add_special_tokens is not False))[0]
