"""Shared by both kinds of completions: from prompts to the generations of one response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from starlette.requests import Request

from pipedec.server.answers import Generations
from pipedec.server.errors import ApiError
from pipedec.server.front import Front, ServedRun
from pipedec.server.observer import Generation
from pipedec.server.prompts import Prompt
from pipedec.server.responses import ResponseHead
from pipedec.server.sampling import GenerationParams
from pipedec.server.settings import ServerSettings


def check_model(name: str | None, settings: ServerSettings) -> str:
    """The name under which a request is served. Raises ApiError (404) for another model."""
    if name is None:
        return settings.model_name
    if name not in settings.served_model_names:
        served = ", ".join(settings.served_model_names)
        raise ApiError(404, f"there is no model {name[:100]!r}: this server has {served}", "model")
    return name


class Asking:
    """One HTTP request for completions.

    Args:
        model: the served name that the client asked for.
        prefix: of the response's id.
    """

    def __init__(self, front: Front, request: Request, model: str, prefix: str) -> None:
        self._front = front
        self._request = request
        self._started = time.perf_counter()
        self.head = ResponseHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def answers(
        self,
        prompts: Sequence[Prompt],
        asked: GenerationParams,
        served: ServedRun,
        is_streamed: bool,
        default_max_tokens: int | None,
    ) -> Generations:
        """Not yet submitted; the choices of each prompt are together. Raises ApiError if one does not fit."""
        generations = [
            Generation(
                self.head.id, self._request.state.request_id, self._request.scope["route"].path, self.head.model, asked.n,
                is_streamed, one, len(prompt.token_ids), prompt.text, self._started,
            )
            for prompt in prompts
            for one in asked.requests(prompt.token_ids, served, default_max_tokens)
        ]  # fmt: skip
        return Generations(self._front, generations)
