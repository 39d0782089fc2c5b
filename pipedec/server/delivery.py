"""From answers to HTTP responses: as one document or as a stream of events, in the shape that a ``ResponseWriter`` gives them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipedec.core.completion import Completion
from pipedec.live.page import event
from pipedec.server.answers import AnswerPart, Generations
from pipedec.server.errors import CLIENT_CLOSED_REQUEST, ApiError, api_error, bad_request
from pipedec.server.front import Front, Generation, ServerSettings
from pipedec.server.prompts import Prompt
from pipedec.server.sampling import GenerationParams

Result = TypeVar("Result")
EVENTS, LINES = "text/event-stream", "application/x-ndjson"  # media types of streams

AppStatus.disable_automatic_graceful_drain()  # a stream goes on while the server drains; ``Front.abort`` ends it


class ResponseHead:
    """Identifies a response; ``model`` is the served name that the client asked for."""

    def __init__(self, prefix: str, model: str) -> None:
        self.started = time.perf_counter()  # when the request's body had arrived
        self.id = f"{prefix}{uuid.uuid4().hex}"
        self.model = model
        self.created = int(time.time())


@dataclass
class Usage:
    """The tokens that a response is charged for, with ``n`` choices of each prompt; they grow while answers arrive."""

    answers: Generations
    n: int = 1
    num_dropped: int = 0  # tokens at the end of each answer that are not the client's
    thought_begin: int | None = None  # the token that begins the thoughts of an answer; None if there is none
    thought_end: int | None = None  # the token that ends them; None if they are not counted
    begins_in_thought: bool = False  # the prompt has begun them
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = sum(generation.prompt_tokens for generation in self.answers.generations[:: self.n])
        self._output = [0] * len(self.answers.generations)

    @property
    def completion_tokens(self) -> int:
        return sum(self._output)

    def count(self, part: AnswerPart) -> None:
        self._output[part.index] = max(0, part.output_tokens - self.num_dropped)
        if part.completion is None:
            return
        if part.index % self.n == 0:
            self.cached_tokens += part.completion.metrics.cached_tokens
        self.reasoning_tokens += self._num_reasoning(part.completion.token_ids)

    def _num_reasoning(self, tokens: Sequence[int]) -> int:
        if self.thought_end in tokens:
            return tokens.index(self.thought_end) + 1
        is_cut = self.thought_end is not None and (self.begins_in_thought or self.thought_begin in tokens)
        return len(tokens) if is_cut else 0


class ResponseWriter(ABC):
    """Gives the answers of one request the shape of an API, as a document or as a stream of events."""

    media_type = EVENTS  # of a stream

    @abstractmethod
    def document(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """The response with all answers."""

    def begin(self, usage: Usage) -> Iterable[bytes]:
        """The events before everything else."""
        return ()

    @abstractmethod
    def events(self, part: AnswerPart, usage: Usage) -> Iterable[bytes]:
        """The events for a part of an answer."""

    @abstractmethod
    def end(self, usage: Usage) -> Iterable[bytes]:
        """The events after all answers."""

    @property
    def ping(self) -> ServerSentEvent | None:
        """The event after each ``ping_seconds``; None for a comment."""
        return None

    @abstractmethod
    def failed(self, error: ApiError) -> Iterable[bytes]:
        """The events instead of what is missing."""


def typed_event(document: Mapping[str, Any]) -> bytes:
    """A server-sent event whose name is the document's type."""
    return b"event: " + document["type"].encode() + b"\n" + event(document)


def tenant_of(request: Request) -> str | None:
    """None without API keys."""
    tenant: str | None = getattr(request.state, "tenant", None)
    return tenant


def answers_of(
    front: Front, request: Request, head: ResponseHead, prompts: Sequence[Prompt], asked: GenerationParams, is_streamed: bool
) -> Generations:
    """The answers of a request, not yet submitted, prompt by prompt. Raises ApiError if one does not fit into the context, or all
    of them never fit into the queue.
    """
    limits, count = front.require().description.settings.limits, len(prompts) * asked.n
    if count > (most := limits.max_num_seqs + limits.max_waiting):
        raise bad_request(
            f"the request asks for {count} answers, but the cluster takes at most {most} at a time (--max-num-seqs and "
            "--max-waiting): send fewer prompts or a smaller n",
            "prompt" if len(prompts) > 1 else "n",
        )
    generations = [
        Generation(
            head.id, request.state.request_id, request.scope["route"].path, head.model, asked.n, is_streamed, one,
            len(prompt.token_ids), prompt.text, head.started,
        )
        for prompt in prompts
        for one in asked.requests(prompt.token_ids, tenant_of(request))
    ]  # fmt: skip
    return Generations(front, generations)


async def respond(request: Request, answers: Generations, writer: ResponseWriter, usage: Usage, is_streamed: bool) -> Response:
    """Submit the requests and answer the client. Raises ApiError or PipedecError before anything was sent."""
    await answers.submit()
    if is_streamed:
        settings, close = answers.front.settings, answers.close
        return EventStream(_events(answers, writer, usage), settings, close, writer.ping, writer.media_type)

    async def complete() -> list[Completion]:
        completions = {}
        async for part in answers.parts():
            if part.completion is not None:
                usage.count(part)
                completions[part.index] = part.completion
        return [completion for _, completion in sorted(completions.items())]

    try:
        completions = await unless_gone(request, complete())
    finally:
        answers.close()
    document = json.dumps(writer.document(completions, usage), separators=(",", ":"))
    return Response(document, media_type="application/json")


async def _events(answers: Generations, writer: ResponseWriter, usage: Usage) -> AsyncIterator[bytes]:
    try:
        for one in writer.begin(usage):
            yield one
        async for part in answers.parts():
            usage.count(part)
            for one in writer.events(part, usage):
                yield one
        for one in writer.end(usage):
            yield one
    except Exception as error:
        for one in writer.failed(api_error(error)):
            yield one


class EventStream(EventSourceResponse):
    """A stream of ready-made events: sse-starlette pings, notices that the client goes away, and waits for no slow reader.

    ``close`` is called when the stream is not read any more, whether it was begun or not, and however it ends. ``ping``: as
    ``ResponseWriter`` has it; streams of other media types have none.
    """

    def __init__(
        self, events: AsyncIterator[bytes], settings: ServerSettings, close: Callable[[], None],
        ping: ServerSentEvent | None = None, media_type: str = EVENTS,
    ) -> None:  # fmt: skip
        own = None if ping is None else lambda: ping
        seconds = settings.ping_seconds if media_type == EVENTS else 0
        super().__init__(
            events, media_type=media_type, ping=seconds, ping_message_factory=own, send_timeout=settings.send_seconds, sep="\n"
        )
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(SendTimeoutError):  # the server closes the connection, since the response is not complete
                await super().__call__(scope, receive, send)
        finally:
            self._close()


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``. Raises ApiError (499) as soon as the client has gone away, which reads it no more."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, going = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, going), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client has gone")
        return working.result()
    finally:
        for task in (working, going):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
