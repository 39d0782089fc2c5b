"""An engine without a cluster: it says what a test has told it to say, with the engine's own handling of characters and stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from pipedec.client.reply import Delta
from pipedec.config import Settings
from pipedec.core.completion import Completion, Metrics
from pipedec.core.errors import PipedecError
from pipedec.live.reading import Frame
from pipedec.messages.events import ThreadNews
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.scheduler.protocol import RunStatus
from pipedec.server.front import Front, ServedRun
from pipedec.text.answer_text import AnswerText
from pipedec.text.tokenizer import Tokenizer
from support.tiny_pair import CONTEXT

ANSWER = "Größe, naïve café, 東京 and \U0001f680 need more than one byte."
Script = Callable[[PromptRequest], Iterable[Sequence[int]]]  # the tokens of each verdict


def logprobs_of(token: int, count: int) -> dict[int, float]:
    """The chosen one is not among the most probable ones."""
    return {token: -1.0, **{(token + other) % 256 + 1: -0.5 * other for other in range(1, count + 1)}}


class ScriptedAnswer:
    """Goes on while ``engine.allowed`` says so."""

    def __init__(self, engine: ScriptedEngine, request: PromptRequest, number: int) -> None:
        self.number = number
        self.request = request
        self.is_cancelled = False
        self._engine = engine
        self._completion = Completion(
            "scripted", 1, len(request.prompt), finish_reason="cancelled", metrics=Metrics(cached_tokens=1)
        )

    async def __aiter__(self) -> AsyncIterator[Delta]:
        sampling, text = self.request.sampling, AnswerText(self._engine.tokenizer, self.request.sampling)
        ends = {*sampling.stop_token_ids, None if sampling.ignore_eos else self._engine.tokenizer.eos_token_id}
        for place, burst in enumerate(self._engine.script(self.request)):
            if not await self._may_go_on(place):
                return
            tokens = list(burst)[: sampling.max_tokens - len(self._completion.token_ids)]
            last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
            pieces = [(token, text.piece(token, index == last)) for index, token in enumerate(tokens[: last + 1])]
            final, count = text.add_pieces(pieces)
            yield self._delta(final, [token for token, _ in pieces[:count]])
            if last < len(tokens) or count is not None or len(self._completion.token_ids) == sampling.max_tokens:
                break
        is_stop = last < len(tokens) or count is not None or len(self._completion.token_ids) < sampling.max_tokens
        self._completion.finish_reason, self._completion.stop_reason = "stop" if is_stop else "length", text.stop_reason
        if rest := "" if count is not None else text.finish():
            yield self._delta(rest, [])

    async def _may_go_on(self, place: int) -> bool:
        while not self.is_cancelled and place >= self._engine.allowed:
            if self._engine.failure is not None:
                raise self._engine.failure
            await asyncio.sleep(0.002)
        return not self.is_cancelled

    def _delta(self, text: str, tokens: list[int]) -> Delta:
        self._completion.token_ids += tokens
        self._completion.text += text
        count = self.request.sampling.logprobs
        known = [] if count is None else [self._engine.logprobs_of(token, count) for token in tokens]
        if count is not None:
            self._completion.logprobs = (self._completion.logprobs or []) + known
        shown = [ThreadNews((), text, "running", len(tokens))] if self.request.show_threads else []
        return Delta(text, tokens, known, shown)

    async def completed(self) -> Completion:
        if self._engine.refusal is not None:
            raise self._engine.refusal
        if self.request.threads is not None:
            self._completion.threads = {"threads": [{"path": [], "text": self._completion.text}]}
        count = self.request.sampling.prompt_logprobs
        if count is not None:
            assert not isinstance(self.request.prompt, str), "the server has made tokens of it"
            rest = [self._engine.logprobs_of(token, count) for token in self.request.prompt[1:]]
            self._completion.prompt_logprobs = [None, *rest]
        return self._completion

    async def cancel(self) -> None:
        self.is_cancelled = True
        self._engine.cancelled.append(self.number)


class ScriptedEngine:
    """See the module.

    Attributes:
        allowed: verdicts that every answer may receive.
        logprobs_of: of a token, with so many others.
        full: raised by ``submit``.
        refusal: raised when an answer is complete; ``failure``: raised while one waits.
        last_status: of the run.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.requests: list[PromptRequest] = []
        self.cancelled: list[int] = []
        self.reset()

    def reset(self) -> None:
        self.allowed = 1 << 30
        self.logprobs_of = logprobs_of
        self.full: PipedecError | None = None
        self.full_after = 0
        self.refusal: PipedecError | None = None
        self.failure: PipedecError | None = None
        self.last_status: RunStatus | None = None
        self.requests.clear()
        self.cancelled.clear()

    async def live(self) -> AsyncIterator[list[Frame]]:
        """Nothing ever happens."""
        await asyncio.Event().wait()
        yield []

    async def submit(self, request: PromptRequest) -> ScriptedAnswer:
        if self.full is not None and len(self.requests) >= self.full_after:
            raise self.full
        self.requests.append(request)
        return ScriptedAnswer(self, request, len(self.requests) - 1)


def attach(front: Front, tokenizer: Tokenizer, script: Script, max_model_len: int = CONTEXT) -> ScriptedEngine:
    """The engine of a run that ``front`` serves from now on."""
    engine = ScriptedEngine(tokenizer, script)
    description = RunDescription(Settings.of(target="target"), ((1, 2),), ((0, 4), (4, 8)))
    front.attach(ServedRun(engine, tokenizer, description, max_model_len))  # type: ignore[arg-type] # has the calls that a server makes
    return engine


def in_bursts(token_ids: list[int], length: int = 1) -> list[list[int]]:
    return [token_ids[place : place + length] for place in range(0, len(token_ids), length)]
