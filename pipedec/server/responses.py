"""From answers to responses: as one document or as a stream of chunks, in the shape that a ``ChoiceWriter`` gives to choices."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pipedec.core import Completion
from pipedec.server.answers import AnswerPart, Generations
from pipedec.server.errors import CLIENT_CLOSED_REQUEST, api_error
from pipedec.server.protocol import GenerationBody
from pipedec.server.sse import DONE, EventStream, event

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has gone before its response."""


@dataclass(frozen=True)
class ResponseHead:
    """The first fields of every document of a response.

    Attributes:
        created: seconds since 1970.
    """

    id: str
    created: int
    model: str

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class ChoiceWriter(ABC):
    """The shape of choices.

    Attributes:
        kind, chunk_kind: the ``object`` of a document, and of a chunk.
        num_dropped: tokens at the end of each answer that are not the client's.
    """

    kind: str
    chunk_kind: str
    num_dropped = 0

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """The choice for a whole answer."""

    @abstractmethod
    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        """The choice for a part of an answer; None to send nothing yet."""


class _Counter:
    """The tokens that a response is charged for.

    Args:
        n: choices of each prompt.
    """

    def __init__(self, answers: Generations, n: int, num_dropped: int) -> None:
        self._prompt_tokens = sum(generation.prompt_tokens for generation in answers.generations[::n])
        self._n = n
        self._num_dropped = num_dropped
        self._output = [0] * len(answers.generations)
        self._cached = 0

    def count(self, part: AnswerPart) -> None:
        self._output[part.index] = max(0, part.output_tokens - self._num_dropped)
        if part.completion is not None and part.index % self._n == 0:
            self._cached += part.completion.metrics.cached_tokens

    def usage(self) -> dict[str, Any]:
        completion_tokens = sum(self._output)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


async def respond(
    request: Request, answers: Generations, body: GenerationBody, head: ResponseHead, writer: ChoiceWriter
) -> Response:
    """Submit the requests and answer the client.

    Raises:
        ApiError, PipedecError: before anything was sent.
    """
    await answers.submit()
    counter = _Counter(answers, body.n or 1, writer.num_dropped)
    if body.stream:
        return EventStream(_events(answers, body, head, writer, counter), answers.front.settings, answers.close)
    try:
        parts = await unless_gone(request, _last_parts(answers))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        answers.close()
    return _document(parts, head, writer, counter)


def _document(parts: Sequence[AnswerPart], head: ResponseHead, writer: ChoiceWriter, counter: _Counter) -> Response:
    choices = []
    for part in parts:
        counter.count(part)
        assert part.completion is not None
        choices.append(writer.choice(part.index, part.completion))
    document = head.document(writer.kind, choices) | {"usage": counter.usage()}
    return Response(json.dumps(document, separators=(",", ":")), media_type="application/json")


async def _last_parts(answers: Generations) -> list[AnswerPart]:
    parts = [part async for part in answers.parts() if part.completion is not None]
    return sorted(parts, key=lambda part: part.index)


async def _events(
    answers: Generations, body: GenerationBody, head: ResponseHead, writer: ChoiceWriter, counter: _Counter
) -> AsyncIterator[bytes]:
    """The chunks, then the usage if it is asked for. An error ends the stream with an event of its own."""
    extra: dict[str, Any] = {"usage": None} if body.includes_usage else {}
    try:
        async for part in answers.parts():
            counter.count(part)
            choice = writer.chunk(part)
            if choice is not None:
                usage = {"usage": counter.usage()} if body.has_continuous_usage else extra
                yield event(head.document(writer.chunk_kind, [choice]) | usage)
        if body.includes_usage:
            yield event(head.document(writer.chunk_kind, []) | {"usage": counter.usage()})
    except Exception as error:
        yield event(api_error(error).body())
    yield DONE


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Do the work while the client waits for it. Raises ClientGone as soon as it does not."""
    working, going = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, going), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, going):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
