"""Responses with choices, the shape of both kinds of OpenAI's completions: chunks and usage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from pipedec.core.completion import Completion
from pipedec.live.page import event
from pipedec.server.answers import AnswerPart
from pipedec.server.delivery import ResponseHead, ResponseWriter, Usage
from pipedec.server.errors import ApiError
from pipedec.server.front import ServedRun
from pipedec.server.logprobs import LogprobWriter
from pipedec.server.protocol import GenerationBody

_DONE = b"data: [DONE]\n\n"


class ChoiceWriter(ABC):
    """Gives a choice its shape, with log-probabilities unless ``most_probable`` is None."""

    kind: str  # the ``object`` of a document
    chunk_kind: str  # and of a chunk

    def __init__(self, body: GenerationBody, most_probable: int | None, served: ServedRun) -> None:
        as_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = None if most_probable is None else LogprobWriter(served.tokenizer, most_probable, as_ids)
        self._has_ids = bool(body.return_token_ids)
        self._has_begun = False

    def more(self, answer: AnswerPart | Completion) -> dict[str, Any]:
        """The fields of a choice that OpenAI's API does not have."""
        completion = answer if isinstance(answer, Completion) else answer.completion
        ended = {} if completion is None else {"stop_reason": completion.stop_reason}
        ids = {"token_ids": list(answer.token_ids)} if self._has_ids else {}
        return ended | ids | _threads_of(answer)

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """The choice for a whole answer."""

    @abstractmethod
    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        """The choice for a part of an answer; None to send nothing yet."""


def _threads_of(answer: AnswerPart | Completion) -> dict[str, Any]:
    """The field of a choice, if there are any threads."""
    if isinstance(answer, Completion):
        return {} if answer.threads is None else {"threads": answer.threads}
    return {"threads": [asdict(news) for news in answer.threads]} if answer.threads else {}


class ChoicesWriter(ResponseWriter):
    """Each answer has its writer; the usage comes as ``stream_options`` ask for it. ``more``: further fields of the response, in
    a stream of its first chunk.
    """

    def __init__(
        self, head: ResponseHead, body: GenerationBody, writers: Sequence[ChoiceWriter], more: Mapping[str, Any] | None = None
    ) -> None:
        self._head = head
        self._writers = writers
        self._more = dict(more or {})
        options = body.stream_options
        self._includes_usage = options is not None and bool(options.include_usage)
        self._is_continuous = options is not None and bool(options.continuous_usage_stats)

    def document(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        choices = [writer.choice(index, one) for index, (writer, one) in enumerate(zip(self._writers, completions, strict=True))]
        return self._fields(self._writers[0].kind, choices) | {"usage": usage_of(usage)} | self._more

    def events(self, part: AnswerPart, usage: Usage) -> Iterator[bytes]:
        choice = self._writers[part.index].chunk(part)
        if choice is not None:
            extra: dict[str, Any] = {"usage": None} if self._includes_usage else {}
            extra = {"usage": usage_of(usage)} if self._is_continuous else extra
            yield self._chunk([choice], extra | self._more)
            self._more = {}

    def end(self, usage: Usage) -> Iterator[bytes]:
        if self._includes_usage:
            yield self._chunk([], {"usage": usage_of(usage)})
        yield _DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield event(error.body())
        yield _DONE

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        return event(self._fields(self._writers[0].chunk_kind, choices) | extra)

    def _fields(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}


def usage_of(usage: Usage) -> dict[str, Any]:
    thoughts = {} if usage.thought_end is None else {"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    } | thoughts
