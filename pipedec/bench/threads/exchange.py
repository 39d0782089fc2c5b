"""The requests behind one answer, decoded by a pipeline in this process, and what they cost on the emulated devices.

Times are computed, not waited for. Owns no prompt and no text: a style decides what is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipedec.bench.record import Row
from pipedec.core import Request, SamplingParams
from pipedec.engine.local import LocalPipeline
from pipedec.messages import PromptRequest
from pipedec.methods import make_options
from pipedec.text.prompt import Prompter
from pipedec.threads import Sequence as ThreadSequence


@dataclass
class Costs:
    """What the requests of one answer have cost, all together, and when.

    Attributes:
        requests: their number.
        prompt_tokens: of all prompts.
        cached_tokens: those of them that were not computed, because a request before had them.
        timesteps: in which the answer was decoded: those of the first prompt are not counted.
        prefill_ms: until the first request had its first token.
        decode_ms: from then on, the prompts of further requests included.
        prompts_ms: the part of it in which they waited for their first tokens, until the last one of a round had it.
        fill: the number of rows of each group in each of the timesteps.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    timesteps: int = 0
    hits: int = 0
    misses: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    prompts_ms: float = 0.0
    fill: list[list[int]] = field(default_factory=list)

    def to_row(self) -> Row:
        """As fields of a row."""
        times = {name: round(getattr(self, name), 3) for name in ("prefill_ms", "decode_ms", "prompts_ms")}
        return {**vars(self), **times}


@dataclass(frozen=True)
class Reply:
    """What was decoded for one request.

    Attributes:
        prompt_tokens: number of tokens of its prompt.
        token_ids: in the order of decoding, with the end token if there is one.
        sequence: its decode threads.
        finish_reason: as in ``Verdict``.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    sequence: ThreadSequence
    finish_reason: str


class Exchange:
    """One answer: a first request, and rounds of further ones, each round decoded together when what came before has ended.

    The requests share the keys and values of equal beginnings with each other, but with no answer before this one.

    Args:
        request: prompt, method and sampling. ``max_tokens`` holds for every request; each draws with a seed of its own.

    Attributes:
        costs: of all requests so far.
    """

    def __init__(self, pipeline: LocalPipeline, prompter: Prompter, request: PromptRequest) -> None:
        assert request.method is not None
        self.request = request
        self.prompter = prompter
        self._pipeline = pipeline
        self._options = make_options(request.method, request.options)
        self.costs = Costs()
        pipeline.forget_prefixes()

    def begin(self, prompt: tuple[int, ...], threads: str | None = None) -> Reply:
        """The first request's reply.

        Args:
            threads: the dialect in which it may open decode threads (``Dialect.to_json``); None for one thread.
        """
        (reply,), total_ms, prefill_ms = self._decode([prompt], threads)
        self._count(self._pipeline.last.metrics.timesteps, total_ms - prefill_ms)
        self.costs.prefill_ms = prefill_ms
        return reply

    def follow(self, prompts: Sequence[tuple[int, ...]]) -> list[Reply]:
        """The replies to further requests, decoded together. Their prompts' time counts."""
        replies, total_ms, prefill_ms = self._decode(prompts)
        self._count(len(self._pipeline.fill), total_ms)
        self.costs.prompts_ms += prefill_ms
        return replies

    def _decode(self, prompts: Sequence[tuple[int, ...]], threads: str | None = None) -> tuple[list[Reply], float, float]:
        """The replies, the time until all are complete, and until all have begun, in ms."""
        method = self.request.method
        assert method is not None
        requests = [
            Request(number, prompt, self._sampling(self.costs.requests + number), method, self._options, threads=threads)
            for number, prompt in enumerate(prompts)
        ]
        for _ in self._pipeline.run_all({1: requests}):
            pass
        answers = [self._pipeline.answers[request.number] for request in requests]
        self.costs.requests += len(answers)
        self.costs.prompt_tokens += sum(map(len, prompts))
        self.costs.cached_tokens += sum(answer.metrics.cached_tokens for answer in answers)
        self.costs.hits += sum(answer.metrics.hits for answer in answers)
        self.costs.misses += sum(answer.metrics.misses for answer in answers)
        replies = [
            Reply(len(prompt), tuple(answer.token_ids), answer.sequence, str(answer.finished))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        began = [1000 * answer.metrics.prefill_seconds for answer in answers]
        ended = [1000 * answer.metrics.decode_seconds + first for answer, first in zip(answers, began, strict=True)]
        return replies, max(ended), max(began)

    def _count(self, timesteps: int, decode_ms: float) -> None:
        """The last timesteps of a run."""
        self.costs.timesteps += timesteps
        self.costs.decode_ms += decode_ms
        self.costs.fill += self._pipeline.fill[len(self._pipeline.fill) - timesteps :]

    def _sampling(self, number: int) -> SamplingParams:
        sampling = self.request.sampling
        return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + number)
