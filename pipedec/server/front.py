"""The state of the front-end: its settings, what it serves, whether it takes requests, which answers are open.

The process that runs the server changes the state; the routes read it. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipedec.client.async_client import AsyncClient, AsyncReply
from pipedec.messages import RunDescription
from pipedec.server.defaults import SamplingDefaults
from pipedec.server.errors import ApiError, unavailable
from pipedec.server.observer import Generation, Observer
from pipedec.text.tokenizer import Tokenizer

_LOADING_RETRY_SECONDS = 5


@dataclass(frozen=True)
class ServerSettings:
    """Names and limits of the HTTP API.

    Attributes:
        served_model_names: names by which clients may ask for the model; responses have the first one.
        api_keys: one of them must come with every request to ``/v1`` and ``/live/feed``; none are needed if there are none.
        allowed_origins, allowed_methods, allowed_headers, allow_credentials: CORS, off without origins.
        max_body_bytes: of a request's body; larger ones are refused with 413.
        body_seconds: in which a body must arrive (408).
        ping_seconds: of silence, after which a stream sends a comment to keep proxies from closing it.
        send_seconds: after which a client that reads nothing of its stream loses it.
        max_prompts: of one request to ``/v1/completions``.
    """

    served_model_names: tuple[str, ...] = ("pipedec",)
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 16 << 20
    body_seconds: float = 30.0
    ping_seconds: float = 15.0
    send_seconds: float = 60.0
    max_prompts: int = 1024

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]

    def check_model(self, name: str | None) -> str:
        """The name under which a request is served. Raises ApiError (404) for another model."""
        if name is None:
            return self.model_name
        if name not in self.served_model_names:
            served = ", ".join(self.served_model_names)
            raise ApiError(404, f"there is no model {name[:100]!r}: this server has {served}", "model")
        return name


@dataclass(frozen=True)
class ServedRun:
    """A run that takes requests.

    Attributes:
        max_model_len: tokens of a prompt and its answer together.
        defaults: sampling parameters of requests that do not set them.
    """

    engine: AsyncClient
    tokenizer: Tokenizer
    description: RunDescription
    max_model_len: int
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


class Front:
    """One per process.

    Args:
        observers: hear of every answer and every response.

    Attributes:
        created: when the process began to serve, in seconds since 1970.
        served: the run; None while it is loading.
        open: the answers that have begun and have not ended.
        is_aborting: they are being ended.
    """

    def __init__(self, settings: ServerSettings, observers: Sequence[Observer] = (), created: int = 0) -> None:
        self.settings = settings
        self.observers = observers
        self.created = created
        self.served: ServedRun | None = None
        self.is_aborting = False
        self._lost: str | None = None
        self._is_draining = False
        self.open: dict[Generation, AsyncReply] = {}
        self._background: set[asyncio.Future[Any]] = set()

    def attach(self, served: ServedRun) -> None:
        """The run takes requests from now on."""
        self.served = served

    def lose(self, reason: str) -> None:
        """No answers come any more: refuse everything. The engine itself ends the open answers with an error."""
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
        """Number of open answers."""
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
                task.exception()  # the run is lost: the answer itself says so

        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(forget)
