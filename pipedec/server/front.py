"""The state of the front-end: its settings, what it serves, whether it takes requests, which answers are open; and its events,
for metrics and logs.

The process that runs the server changes the state; the routes read it. Used on the event loop only. Times of events are seconds
of ``time.perf_counter``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipedec.client.async_client import AsyncClient, AsyncReply
from pipedec.core.completion import Completion
from pipedec.grammar.apart import StructureChecks
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.server.defaults import SamplingDefaults
from pipedec.server.errors import ApiError, unavailable
from pipedec.text.parsers import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser, tool_parser
from pipedec.text.parsers.parser import ReasoningParser, ToolParser
from pipedec.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
LATEST = ":latest"  # Ollama's clients put it after names
_LOADING_RETRY_SECONDS = 5


@dataclass(frozen=True)
class ServerSettings:
    """Names and limits of the HTTP API."""

    served_model_names: tuple[str, ...] = ("pipedec",)  # by which clients may ask for the model; responses have the first one
    api_keys: tuple[str, ...] = ()  # if any, one must come with all but pages, health and metrics
    allowed_origins: tuple[str, ...] = ()  # CORS is off without origins
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 16 << 20  # larger ones are refused with 413
    body_seconds: float = 30.0  # in which a body must arrive (408)
    ping_seconds: float = 15.0  # after so long a silence a stream sends a comment, which keeps proxies from closing it
    send_seconds: float = 60.0  # after which a client that reads nothing of its stream loses it
    max_stored_responses: int = 1000  # of ``/v1/responses``, for clients that go on with them; 0 keeps none
    max_prompts: int = 1024  # that one request to ``/v1/completions`` may have
    reasoning_parser: str = AUTO  # names of parsers, ``auto`` for that of the chat template, ``none`` for text as it is
    tool_call_parser: str = AUTO

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]

    def check_model(self, name: str | None) -> str:
        """The name under which a request is served; it may come with ``LATEST``. Raises ApiError (404) for another model."""
        if name is None:
            return self.model_name
        for served in (name, name.removesuffix(LATEST)):
            if served in self.served_model_names:
                return served
        known = ", ".join(self.served_model_names)
        raise ApiError(404, f"there is no model {name[:100]!r}: this server has {known}", "model")


@dataclass(frozen=True)
class ServedRun:
    """A run that takes requests."""

    engine: AsyncClient
    tokenizer: Tokenizer
    description: RunDescription
    max_model_len: int  # tokens of a prompt and its answer together
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)  # for requests that do not set them

    @property
    def vocab_size(self) -> int:
        """The tokens that a request may name."""
        return self.description.vocab_size or len(self.tokenizer)

    @cached_property
    def structures(self) -> StructureChecks:
        """Checks structures for the model."""
        return StructureChecks(self.tokenizer.directory)


@dataclass(eq=False)
class Generation:
    """One answer that a client asked for: a choice of one prompt of an HTTP request."""

    response_id: str  # the response that it belongs to, ``cmpl-…`` or ``chatcmpl-…``
    request_id: str  # the HTTP request, as client or server have named it (``X-Request-Id``); it need not be unique
    endpoint: str  # path of the route, ``/v1/chat/completions`` for example
    model: str  # the served name
    n: int  # choices per prompt that the HTTP request asked for
    stream: bool
    request: PromptRequest
    prompt_tokens: int
    prompt_text: str  # as the client gave it, messages as JSON
    started: float  # when the HTTP request's body had arrived
    number: int | None = None  # names the engine's request; None before it is submitted
    output_tokens: int = 0  # that have arrived so far


@dataclass(frozen=True)
class HttpExchange:
    """An HTTP request that was answered, with any status."""

    request_id: str
    method: str
    route: str  # path of the route, ``/v1/completions`` for example; ``other`` if there is none
    status: int  # 499 if the client went away before a response began
    seconds: float  # until the response had ended
    client: str = ""  # its address
    error: str | None = None  # the message of an error response


class Observer:
    """Receives the events of answers and responses; a subclass overrides what it needs."""

    def began(self, generation: Generation) -> None:
        """The engine has taken the request."""

    def tokens(self, generation: Generation, count: int, arrived: float) -> None:
        """``count`` > 0 tokens have arrived, at the time ``arrived``; the first call is the first token's.

        ``generation.output_tokens`` counts them already.
        """

    def ended(self, generation: Generation, reason: str, completion: Completion | None) -> None:
        """The answer has ended; called once for each that began. ``completion`` is None if the engine has sent none.

        ``reason``: ``stop``, ``length``, ``abort`` (cancelled, or the client went away) or ``error``.
        """

    def responded(self, exchange: HttpExchange) -> None:
        """An HTTP request was answered; a refusal, for example 503, is one, too."""


class Front:
    """The one front-end of a process. Its ``observers`` receive the events of every answer and every response."""

    def __init__(self, settings: ServerSettings, observers: Sequence[Observer] = (), created: int = 0) -> None:
        self.settings = settings
        self.observers = observers
        self.created = created  # when the process began to serve, in seconds since 1970
        self.served: ServedRun | None = None  # None while it is loading
        self.reasoning: ReasoningParser | None = None  # how the model writes its thoughts, if that is known
        self.tool_parser: ToolParser | None = None  # how it calls tools
        self.is_aborting = False  # the open answers are being ended
        self._lost: str | None = None
        self._is_draining = False
        self.open: dict[Generation, AsyncReply] = {}  # the answers that have begun and have not ended
        self._background: set[asyncio.Future[Any]] = set()

    def attach(self, served: ServedRun) -> None:
        self.served, template = served, served.tokenizer.tool_template
        reasoning, tools = self.settings.reasoning_parser, self.settings.tool_call_parser
        self.reasoning = reasoning_parser(template) if reasoning == AUTO else REASONING_PARSERS.get(reasoning)
        self.tool_parser = tool_parser(template) if tools == AUTO else TOOL_PARSERS.get(tools)

    def lose(self, reason: str) -> None:
        """Refuse everything: the cluster is lost. The engine itself ends the open answers with an error."""
        self._lost = reason

    def drain(self) -> None:
        """Refuse new requests; those that run go on."""
        self._is_draining = True

    def abort(self) -> None:
        """End all open answers with what they have, as finish reason ``abort``."""
        self.is_aborting = True
        for answer in self.open.values():
            self.in_background(answer.cancel())

    @property
    def unfinished(self) -> int:
        return len(self.open)

    @property
    def is_ending(self) -> bool:
        """Whether no further requests are taken."""
        return self._is_draining or self._lost is not None

    def require(self, is_ready: bool = True) -> ServedRun:
        """The run. Raises ApiError if it takes no requests, with ``is_ready`` also while it drains."""
        if self._lost is not None:
            raise unavailable(f"the cluster was lost: {self._lost}", _LOADING_RETRY_SECONDS)
        if self.served is None:
            raise unavailable("the model is loading: try again in a few seconds", _LOADING_RETRY_SECONDS)
        if self._is_draining and is_ready:
            raise unavailable("the server is shutting down: ask another one, or try again", _LOADING_RETRY_SECONDS)
        return self.served

    def in_background(self, work: Awaitable[Any]) -> None:
        """Await ``work`` even if the caller is cancelled: a cancelled task can wait for nothing."""

        def forget(task: asyncio.Future[Any]) -> None:
            self._background.discard(task)
            if not task.cancelled():
                task.exception()  # the run is lost, as the answer itself reports

        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(forget)
