"""The state of the front-end: what it serves, whether it takes requests, which answers are open.

The process that runs the server changes the state; the routes read it. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from pipedec.messages import RunDescription
from pipedec.scheduler.protocol import RunStatus
from pipedec.server.defaults import SamplingDefaults
from pipedec.server.engine import AnswerStream, Engine
from pipedec.server.errors import ApiError, unavailable
from pipedec.server.observer import Observer
from pipedec.server.settings import ServerSettings
from pipedec.text.tokenizer import Tokenizer

_LOADING_RETRY_SECONDS = 5


@dataclass(frozen=True)
class ServedRun:
    """A run that takes requests.

    Attributes:
        max_model_len: tokens of a prompt and its answer together.
        defaults: sampling parameters of requests that do not set them.
    """

    engine: Engine
    tokenizer: Tokenizer
    description: RunDescription
    max_model_len: int
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


class Front:
    """One per process.

    Args:
        observer: hears of every answer and every response.

    Attributes:
        created: when the process began to serve, in seconds since 1970.
        is_aborting: open answers are being ended.
    """

    def __init__(self, settings: ServerSettings, observer: Observer | None = None, created: int = 0) -> None:
        self.settings = settings
        self.observer = observer or Observer()
        self.created = created
        self._served: ServedRun | None = None
        self._lost: str | None = None
        self._is_draining = False
        self.is_aborting = False
        self._open: dict[object, AnswerStream] = {}
        self._background: set[asyncio.Future[Any]] = set()

    def attach(self, served: ServedRun) -> None:
        """The run takes requests from now on."""
        self._served = served

    def lose(self, reason: str) -> None:
        """No answers come any more: refuse everything. The engine itself ends the open answers with an error."""
        self._lost = reason

    def drain(self) -> None:
        """Refuse new requests; those that run go on."""
        self._is_draining = True

    def abort(self) -> None:
        """End all open answers with what they have, as finish reason ``abort``."""
        self.is_aborting = True
        for answer in self._open.values():
            self.in_background(answer.cancel())

    @property
    def unfinished(self) -> int:
        """Number of open answers."""
        return len(self._open)

    @property
    def is_ending(self) -> bool:
        """Whether no further requests are taken."""
        return self._is_draining or self._lost is not None

    @property
    def served(self) -> ServedRun | None:
        """The run; None while it is loading."""
        return self._served

    def last_status(self) -> RunStatus | None:
        """The latest report of the run; None before the first."""
        return None if self._served is None else self._served.engine.last_status

    def problem(self, is_ready: bool = True) -> ApiError | None:
        """Why requests are refused; None if they are not.

        Args:
            is_ready: draining counts, too.
        """
        if self._lost is not None:
            return unavailable(f"the cluster was lost: {self._lost}", _LOADING_RETRY_SECONDS)
        if self._served is None:
            return unavailable("the model is loading: try again in a few seconds", _LOADING_RETRY_SECONDS)
        if self._is_draining and is_ready:
            return unavailable("the server is shutting down: ask another one, or try again", _LOADING_RETRY_SECONDS)
        return None

    def require(self) -> ServedRun:
        """The run. Raises ApiError if it takes no requests."""
        problem = self.problem()
        if problem is not None:
            raise problem
        assert self._served is not None
        return self._served

    def opened(self, key: object, answer: AnswerStream) -> None:
        """An answer has begun; ``key`` is its own."""
        self._open[key] = answer

    def closed(self, key: object) -> None:
        self._open.pop(key, None)

    def in_background(self, work: Awaitable[Any]) -> None:
        """Await ``work`` even if the caller is cancelled: a cancelled task can wait for nothing."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # the run is lost: the answer itself says so
