"""Log lines of requests: the client, the request, its outcome. Prompts only if the operator has asked for them."""

from __future__ import annotations

import logging
import time
from typing import Any

from msgspec import to_builtins

from pipedec.core import Completion, SamplingParams
from pipedec.server.logs import log
from pipedec.server.observer import Generation, HttpExchange, Observer

_POLLED = ("/health", "/ready", "/metrics")
_POLL_ANSWERS = (200, 503)
_ID_CHARS = 200
_DEFAULTS = to_builtins(SamplingParams())


class RequestLog(Observer):
    """Writes a line when an answer begins and ends, and one for each HTTP response but those to polls.

    What polls of ``/health`` and ``/ready`` find, 503 included, is logged once, when it changes, by the process that changes it.

    Args:
        with_prompts: log prompts, parameters, and messages of refusals, which quote requests.
        max_length: characters of a prompt; None for all of it.
    """

    def __init__(self, with_prompts: bool = False, max_length: int | None = None) -> None:
        self._with_prompts = with_prompts
        self._max_length = max_length

    def began(self, generation: Generation) -> None:
        request = generation.request
        asked: dict[str, Any] = (
            {
                "prompt": generation.prompt_text[: self._max_length],
                "sampling": _changed(request.sampling),
                "method": request.method,
            }
            if self._with_prompts
            else {}
        )
        log(
            "request", **_ids(generation), endpoint=generation.endpoint, model=generation.model, stream=generation.stream,
            prompt_tokens=generation.prompt_tokens, max_tokens=request.sampling.max_tokens, **asked,
        )  # fmt: skip

    def ended(self, generation: Generation, reason: str, completion: Completion | None) -> None:
        metrics: dict[str, Any] = {} if completion is None else {"cached_tokens": completion.metrics.cached_tokens}
        log(
            "answer", **_ids(generation), finish_reason=reason, prompt_tokens=generation.prompt_tokens,
            output_tokens=generation.output_tokens, seconds=round(time.perf_counter() - generation.started, 6), **metrics,
        )  # fmt: skip

    def responded(self, exchange: HttpExchange) -> None:
        if exchange.route in _POLLED and exchange.status in _POLL_ANSWERS:
            return
        log(
            "response", logging.ERROR if exchange.status == 500 else logging.INFO, request_id=exchange.request_id[:_ID_CHARS],
            method=exchange.method, route=exchange.route, status=exchange.status, seconds=round(exchange.seconds, 6),
            client=exchange.client, error=exchange.error if self._with_prompts or exchange.status >= 500 else None,
        )  # fmt: skip


def _ids(generation: Generation) -> dict[str, Any]:
    return {
        "request_id": generation.request_id[:_ID_CHARS], "response_id": generation.response_id, "number": generation.number,
    }  # fmt: skip


def _changed(sampling: SamplingParams) -> dict[str, object]:
    """The parameters that are not the defaults."""
    return {name: value for name, value in to_builtins(sampling).items() if value != _DEFAULTS[name]}
