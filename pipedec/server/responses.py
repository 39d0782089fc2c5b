"""From answers to responses: as one document or as a stream of chunks, in the shape that a ``ChoiceWriter`` gives to choices."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec.structs import asdict
from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipedec.core.completion import Completion
from pipedec.live.page import event
from pipedec.server.answers import AnswerPart, Generations, TokenLogprob
from pipedec.server.errors import CLIENT_CLOSED_REQUEST, ApiError, api_error, bad_request
from pipedec.server.front import Front, Generation, ServedRun, ServerSettings
from pipedec.server.prompts import Prompt
from pipedec.server.protocol import GenerationBody
from pipedec.server.sampling import GenerationParams
from pipedec.text.tokenizer import Tokenizer

Result = TypeVar("Result")

AppStatus.disable_automatic_graceful_drain()  # a stream goes on while the server drains; ``Front.abort`` ends it


class ResponseHead:
    """The first fields of every document of a response; ``model`` is the served name that the client asked for."""

    def __init__(self, prefix: str, model: str) -> None:
        self.started = time.perf_counter()  # when the request's body had arrived
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.model = model
        self._created = int(time.time())

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.model, "choices": choices}


class LogprobWriter:
    """Writes the log-probabilities of one answer, piece by piece, in the two shapes of OpenAI's API."""

    def __init__(self, tokenizer: Tokenizer, most_probable: int, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._most_probable = most_probable  # how many tokens to show besides the chosen one
        self._as_ids = as_ids  # show tokens as ``token_id:ID``
        self._offset = 0  # characters of the response's text before the next token
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def completion(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """As ``/v1/completions`` shows them. The first token of a prompt has none."""
        best: list[dict[str, float] | None] = []
        offsets = []
        for chosen, known in tokens:
            offsets.append(self._offset)  # where a token only ends a character, the offset of that character
            self._offset += len(self._characters.decode(self._tokenizer.token_bytes(chosen)))
            if known is None:
                best.append(None)
                continue
            values: dict[str, float] = {}  # where tokens look alike, the more probable one
            for token, value in [(chosen, known[chosen]), *self._best(known)]:
                values.setdefault(self._name(token), value)
            best.append(values)
        return {
            "tokens": [self._name(token) for token, _ in tokens],
            "token_logprobs": [None if known is None else known[token] for token, known in tokens],
            "top_logprobs": best,
            "text_offset": offsets,
        }

    def chat(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self._entry(token, known[token]) | {"top_logprobs": [self._entry(*one) for one in self._best(known)]}
                for token, known in tokens
                if known is not None
            ]
        }

    def _best(self, known: Mapping[int, float]) -> list[tuple[int, float]]:
        """The most probable tokens, best first; the chosen one is among them only if it is one of them."""
        is_among = len(known) <= self._most_probable
        return sorted(list(known.items())[0 if is_among else 1 :], key=lambda pair: -pair[1])

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": value, "bytes": list(self._tokenizer.token_bytes(token))}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token(token)


class ChoiceWriter(ABC):
    """Gives a choice its shape, with log-probabilities unless ``most_probable`` is None."""

    kind: str  # the ``object`` of a document
    chunk_kind: str  # and of a chunk
    num_dropped = 0  # tokens at the end of the answer that are not the client's

    def __init__(self, body: GenerationBody, most_probable: int | None, served: ServedRun) -> None:
        as_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = None if most_probable is None else LogprobWriter(served.tokenizer, most_probable, as_ids)
        self._has_begun = False

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """The choice for a whole answer."""

    @abstractmethod
    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        """The choice for a part of an answer; None to send nothing yet."""


def threads_of(answer: AnswerPart | Completion) -> dict[str, Any]:
    """The field of a choice, if there are any threads."""
    if isinstance(answer, Completion):
        return {} if answer.threads is None else {"threads": answer.threads}
    return {"threads": [asdict(news) for news in answer.threads]} if answer.threads else {}


class _Counter:
    """The tokens that a response is charged for, with ``n`` choices of each prompt."""

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
    tenant = getattr(request.state, "tenant", None)  # without API keys there is none
    generations = [
        Generation(
            head.id, request.state.request_id, request.scope["route"].path, head.model, asked.n, is_streamed, one,
            len(prompt.token_ids), prompt.text, head.started,
        )
        for prompt in prompts
        for one in asked.requests(prompt.token_ids, tenant)
    ]  # fmt: skip
    return Generations(front, generations)


async def respond(
    request: Request, answers: Generations, body: GenerationBody, head: ResponseHead, writers: Sequence[ChoiceWriter]
) -> Response:
    """Submit the requests and answer the client; each answer has its writer. Raises ApiError or PipedecError before anything was
    sent.
    """
    await answers.submit()
    counter = _Counter(answers, body.n or 1, writers[0].num_dropped)
    if body.stream:
        return EventStream(_events(answers, body, head, writers, counter), answers.front.settings, answers.close)

    async def complete() -> list[dict[str, Any]]:
        choices = {}
        async for part in answers.parts():
            if part.completion is not None:
                counter.count(part)
                choices[part.index] = writers[part.index].choice(part.index, part.completion)
        return [choice for _, choice in sorted(choices.items())]

    try:
        choices = await unless_gone(request, complete())
    finally:
        answers.close()
    document = head.document(writers[0].kind, choices) | {"usage": counter.usage()}
    return Response(json.dumps(document, separators=(",", ":")), media_type="application/json")


async def _events(
    answers: Generations, body: GenerationBody, head: ResponseHead, writers: Sequence[ChoiceWriter], counter: _Counter
) -> AsyncIterator[bytes]:
    """The chunks, then the usage if it is asked for. An error ends the stream with an event of its own."""
    options = body.stream_options
    includes_usage = options is not None and options.include_usage
    extra: dict[str, Any] = {"usage": None} if includes_usage else {}
    try:
        async for part in answers.parts():
            counter.count(part)
            choice = writers[part.index].chunk(part)
            if choice is not None:
                usage = {"usage": counter.usage()} if options is not None and options.continuous_usage_stats else extra
                yield event(head.document(writers[0].chunk_kind, [choice]) | usage)
        if includes_usage:
            yield event(head.document(writers[0].chunk_kind, []) | {"usage": counter.usage()})
    except Exception as error:
        yield event(api_error(error).body())
    yield b"data: [DONE]\n\n"


class EventStream(EventSourceResponse):
    """A stream of ready-made events: sse-starlette pings, notices that the client goes away, and waits for no slow reader.

    ``close`` is called when the stream is not read any more, whether it was begun or not, and however it ends.
    """

    def __init__(self, events: AsyncIterator[bytes], settings: ServerSettings, close: Callable[[], None]) -> None:
        super().__init__(events, ping=settings.ping_seconds, send_timeout=settings.send_seconds, sep="\n")
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
