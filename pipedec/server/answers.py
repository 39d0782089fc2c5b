"""The answers of one HTTP request: submitted together, read part by part or as a whole, cancelled when the client leaves.

Knows no HTTP and no shape of a response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipedec.client.reply import Delta
from pipedec.core.completion import Completion
from pipedec.core.errors import UserError
from pipedec.messages.events import ThreadNews
from pipedec.server.front import Front, Generation

TokenLogprob = tuple[int, Mapping[int, float] | None]  # token id, log-probabilities by token id with the chosen one first
_REASONS = {"cancelled": "abort", "cache_full": "length", None: "abort"}
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class AnswerPart:
    """A new part of the answer ``index``."""

    index: int
    text: str
    token_ids: Sequence[int] = ()  # in order, and complete when the answer is
    tokens: Sequence[TokenLogprob] = ()  # the same, if log-probabilities were asked for
    threads: Sequence[ThreadNews] = ()
    output_tokens: int = 0  # that have arrived so far
    completion: Completion | None = None  # with the last part

    @property
    def finish_reason(self) -> str | None:
        return None if self.completion is None else finish_reason(self.completion)


def text_of(completion: Completion) -> str:
    """The text of an answer, without a last character that was cut off."""
    return completion.text if completion.finish_reason == "stop" else completion.text.rstrip(_INCOMPLETE)


def tokens_of(completion: Completion) -> list[TokenLogprob]:
    """The tokens of an answer with their log-probabilities; nothing if those were not asked for."""
    return list(zip(completion.token_ids, completion.logprobs or (), strict=False))


def finish_reason(completion: Completion) -> str:
    """The finish reason in OpenAI's words; ``abort`` for an answer that was cancelled."""
    return _REASONS.get(completion.finish_reason) or str(completion.finish_reason)


@dataclass
class _Reader:
    """Turns deltas into parts, each of which has text: tokens whose text is not final wait for the next one.

    A last character that was cut off is left out.
    """

    index: int
    generation: Generation
    num_sent: int = 0  # tokens
    num_characters: int = 0  # that were sent
    held: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)

    def read(self, delta: Delta) -> AnswerPart | None:
        """None if there is nothing to show yet."""
        if self.generation.request.threads is None:
            self.token_ids += delta.token_ids
            self.logprobs += delta.logprobs
        text = self.held + delta.text
        final = text.rstrip(_INCOMPLETE)
        self.held = text[len(final) :]
        if not final and not delta.threads:
            return None
        self.num_characters += len(final)
        count = len(self.token_ids) if self.generation.request.sampling.logprobs is None else len(self.logprobs)
        token_ids, logprobs = self.token_ids[:count], self.logprobs[:count]
        del self.token_ids[:count], self.logprobs[:count]
        self.num_sent += len(token_ids)
        tokens = list(zip(token_ids, logprobs, strict=False))
        return AnswerPart(self.index, final, token_ids, tokens, delta.threads, self.generation.output_tokens)

    def finish(self, completion: Completion) -> AnswerPart:
        rest = text_of(completion)[self.num_characters :]
        tokens = tokens_of(completion)[self.num_sent :]
        token_ids = completion.token_ids[self.num_sent :]
        return AnswerPart(self.index, rest, token_ids, tokens, (), len(completion.token_ids), completion)


class Generations:
    """The answers of one request. The caller that submits them closes them in the end."""

    def __init__(self, front: Front, generations: Sequence[Generation]) -> None:
        self.front = front
        self.generations = generations

    async def submit(self) -> None:
        """Submit all, or none. Raises UserError, QueueFull, RankLost or SchedulerLost."""
        try:
            for generation in self.generations:
                answer = await self.front.require().engine.submit(generation.request)
                generation.number = answer.number
                self.front.open[generation] = answer
                for observer in self.front.observers:
                    observer.began(generation)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what has not ended. May be called twice."""
        for generation in self.generations:
            if (answer := self.front.open.get(generation)) is not None:
                self.front.in_background(answer.cancel())
                self._end(generation, "abort", None)

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """New parts of all answers, as they arrive. Raises UserError, RankLost or SchedulerLost."""
        if len(self.generations) == 1:
            async for part in self._read(0):
                yield part
            return
        readers = [self._read(index) for index in range(len(self.generations))]
        waiting = {asyncio.ensure_future(anext(reader)): reader for reader in readers}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                failed = [task for task in done if task.exception() is not None]
                for task in [*failed, *(done - set(failed))]:
                    reader = waiting.pop(task)
                    part = task.result()
                    if part.completion is None:
                        waiting[asyncio.ensure_future(anext(reader))] = reader
                    yield part
        finally:
            for task in waiting:
                task.cancel()

    async def _read(self, index: int) -> AsyncIterator[AnswerPart]:
        """The parts of one answer; the last one has the completion."""
        generation = self.generations[index]
        reader, answer = _Reader(index, generation), self.front.open[generation]
        try:
            async for delta in answer:
                if count := len(delta.token_ids):
                    generation.output_tokens += count
                    for observer in self.front.observers:
                        observer.tokens(generation, count, delta.arrived)
                part = reader.read(delta)
                if part is not None:
                    yield part
            try:
                completion = await answer.completed()
            except UserError:
                if not self.front.is_aborting:
                    raise
                method, reason = generation.request.method or "", "cancelled"
                completion = Completion(method, 0, generation.prompt_tokens, finish_reason=reason)
        except Exception:
            self._end(generation, "error", None)
            raise
        self._end(generation, finish_reason(completion), completion)
        yield reader.finish(completion)

    def _end(self, generation: Generation, reason: str, completion: Completion | None) -> None:
        if self.front.open.pop(generation, None) is not None:
            for observer in self.front.observers:
                observer.ended(generation, reason, completion)
