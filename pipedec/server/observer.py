"""Events at the front-end, for metrics and logs. Knows neither.

Times are seconds of ``time.perf_counter``. Observers are called on the event loop: they must not block.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipedec.core import Completion
from pipedec.messages import PromptRequest


@dataclass(eq=False)
class Generation:
    """One answer that a client asked for: a choice of one prompt of an HTTP request.

    Attributes:
        response_id: of the response that it belongs to, ``cmpl-…`` or ``chatcmpl-…``.
        request_id: of the HTTP request, as the client or the server chose it (``X-Request-Id``); it need not be unique.
        endpoint: path of the route, ``/v1/chat/completions`` for example.
        model: the served name.
        n: choices per prompt that the HTTP request asked for.
        prompt_tokens: their number.
        prompt_text: the prompt as the client gave it, messages as JSON.
        started: when the HTTP request's body had arrived.
        number: of the engine's request; None before it is submitted.
        output_tokens: that have arrived so far.
    """

    response_id: str
    request_id: str
    endpoint: str
    model: str
    n: int
    stream: bool
    request: PromptRequest
    prompt_tokens: int
    prompt_text: str
    started: float
    number: int | None = None
    output_tokens: int = 0


@dataclass(frozen=True)
class HttpExchange:
    """An HTTP request that was answered, with any status.

    Attributes:
        route: path of the route, ``/v1/completions`` for example; ``other`` if there is none.
        status: 499 if the client went away before a response began.
        seconds: until the response had ended.
        client: its address.
        error: the message of an error response.
    """

    request_id: str
    method: str
    route: str
    status: int
    seconds: float
    client: str = ""
    error: str | None = None


class Observer:
    """Hears what happens; every method may be left as it is."""

    def began(self, generation: Generation) -> None:
        """The engine has taken the request."""

    def tokens(self, generation: Generation, count: int, arrived: float) -> None:
        """``count`` > 0 tokens have arrived, at the time ``arrived``; the first call is the first token's.

        ``generation.output_tokens`` counts them already.
        """

    def ended(self, generation: Generation, reason: str, completion: Completion | None) -> None:
        """The answer has ended; called once for each that began.

        Args:
            reason: ``stop``, ``length``, ``abort`` (cancelled, or the client went away) or ``error``.
            completion: None if the engine has sent none.
        """

    def responded(self, exchange: HttpExchange) -> None:
        """An HTTP request was answered; a refusal, for example 503, is one, too."""
