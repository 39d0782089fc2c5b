"""Answers of one emulated pipeline in several styles: in one thread, in a dialect's threads, or in a style of another package.

Owns the pipelines, one per style, so that a method learns from answers of one kind only. The requests for one answer are an
``DecodeRounds``; a style decides what is asked, and puts the answer together. Times are computed, not waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from msgspec.structs import replace

from pipedec.bench.record import Row, key_of
from pipedec.bench.threads.rows import SEQUENTIAL
from pipedec.core import Request, SamplingParams
from pipedec.engine.build import load_prompter
from pipedec.engine.local import LocalPipeline
from pipedec.messages import PromptRequest
from pipedec.methods import make_options
from pipedec.plan.spec import PipelineSpec
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect, ThreadMetrics, load_dialect, measure
from pipedec.threads import Sequence as ThreadSequence


class ThreadAnswers:
    """Generates answers, each in one of ``styles``, and the figures of their rows."""

    def __init__(self, spec: PipelineSpec, styles: Mapping[str, Style]) -> None:
        self._spec = spec
        self._styles = styles
        self._prompter = load_prompter(spec)
        self._pipelines: dict[str, LocalPipeline] = {}

    def token_ids(self, prompt: str | tuple[int, ...], raw: bool, max_tokens: int) -> tuple[int, ...]:
        """The prompt in the style in which it is longest. Raises UserError like ``Prompter.token_ids``."""
        request = PromptRequest(prompt, raw, sampling=SamplingParams(max_tokens=max_tokens))
        return max((style.prompt(self._prompter, request) for style in self._styles.values()), key=len)

    def generate(self, request: PromptRequest, style: str) -> Row:
        """The figures of the answer to ``request``."""
        exchange = DecodeRounds(self._pipeline(style), self._prompter, request)
        written = self._styles[style].answer(exchange)
        return {**exchange.costs.to_row(), **written.to_row()}

    def _pipeline(self, style: str) -> LocalPipeline:
        """Loaded for the first answer that has to be generated."""
        if style not in self._pipelines:
            self._pipelines[style] = LocalPipeline.load(self._spec)
        return self._pipelines[style]


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
class DecodedReply:
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


class DecodeRounds:
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

    def begin(self, prompt: tuple[int, ...], threads: str | None = None) -> DecodedReply:
        """The first request's reply.

        Args:
            threads: the dialect in which it may open decode threads (``Dialect.to_json``); None for one thread.
        """
        (reply,), total_ms, prefill_ms = self._decode([prompt], threads)
        self._count(self._pipeline.last.metrics.timesteps, total_ms - prefill_ms)
        self.costs.prefill_ms = prefill_ms
        return reply

    def follow(self, prompts: Sequence[tuple[int, ...]]) -> list[DecodedReply]:
        """The replies to further requests, decoded together. Their prompts' time counts."""
        replies, total_ms, prefill_ms = self._decode(prompts)
        self._count(len(self._pipeline.fill), total_ms)
        self.costs.prompts_ms += prefill_ms
        return replies

    def _decode(self, prompts: Sequence[tuple[int, ...]], threads: str | None = None) -> tuple[list[DecodedReply], float, float]:
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
            DecodedReply(len(prompt), tuple(answer.token_ids), answer.sequence, str(answer.finished))
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


@dataclass(frozen=True)
class WrittenAnswer:
    """What does not depend on methods and pipelines: an answer's tokens and what is said of them.

    Attributes:
        document: every token that was decoded or forced, each with the thread or the request that it belongs to. Answers are
            equal if their documents are.
        finish_reason: of the answer, as in ``Verdict``; ``length`` if any part of it ended at ``max_tokens``.
        decoded_text: text tokens that were decoded after the answer's first token.
        metrics: what was decoded in parallel, and what it attended to.
        anomalies: what went wrong, a count by name.
    """

    document: list[tuple[object, int]]
    finish_reason: str
    decoded_text: int
    metrics: ThreadMetrics
    anomalies: Mapping[str, int] = field(default_factory=dict)

    def to_row(self) -> Row:
        """As fields of a row."""
        return {
            "document": key_of(self.document), "finish_reason": self.finish_reason, "decoded_text": self.decoded_text,
            "metrics": asdict(self.metrics), "anomalies": dict(self.anomalies),
        }  # fmt: skip


def sequential_metrics(prompt_tokens: int, tokens: int, text_tokens: int) -> ThreadMetrics:
    """The metrics of an answer in one thread."""
    attended, cached = (prompt_tokens + (text_tokens - 1) / 2 if text_tokens else 0.0), prompt_tokens + text_tokens
    return ThreadMetrics(
        1, tokens, text_tokens, tokens, text_tokens / tokens if tokens else 0.0, attended, attended, cached, cached
    )  # fmt: skip


class Style(Protocol):
    """One way to answer a prompt."""

    @property
    def name(self) -> str:
        """In tables and flags."""

    @property
    def settings(self) -> str | None:
        """What the answer depends on besides prompt, model and sampling; None for nothing."""

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        """The prompt of the first request for the answer to ``request``. Raises UserError like ``Prompter.token_ids``."""

    def answer(self, exchange: DecodeRounds) -> WrittenAnswer:
        """The answer to ``exchange.request``. Raises UserError like ``LocalPipeline.run_all``."""


def find_style(name_or_path: str) -> Style:
    """One thread, or a dialect by its name or file. Raises UserError like ``load_dialect``."""
    return OneThread() if name_or_path == SEQUENTIAL else InThreads(load_dialect(name_or_path))


@dataclass(frozen=True)
class OneThread:
    """One request, one thread."""

    name: str = SEQUENTIAL
    settings: str | None = None

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        return prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens)

    def answer(self, exchange: DecodeRounds) -> WrittenAnswer:
        reply = exchange.begin(self.prompt(exchange.prompter, exchange.request))
        special = exchange.prompter.tokenizer.all_special_ids
        is_text = [token not in special for token in reply.token_ids]
        metrics = sequential_metrics(reply.prompt_tokens, len(is_text), sum(is_text))
        document: list[tuple[object, int]] = [(0, token) for token in reply.token_ids]
        return WrittenAnswer(document, reply.finish_reason, sum(is_text[1:]), metrics)


@dataclass(frozen=True)
class InThreads:
    """One request, decode threads in a dialect."""

    dialect: Dialect

    @property
    def name(self) -> str:
        return self.dialect.name

    @property
    def settings(self) -> str | None:
        return self.dialect.to_json()

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        return prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens, self.dialect.name)

    def answer(self, exchange: DecodeRounds) -> WrittenAnswer:
        """The document contains thread paths, not numbers: numbers depend on the order in which threads opened."""
        reply = exchange.begin(self.prompt(exchange.prompter, exchange.request), self.settings)
        sequence = reply.sequence
        written = sequence.document()
        document: list[tuple[object, int]] = [
            (list(sequence.threads[token.thread].path), token.token_id) for token in written
        ]  # fmt: skip
        decoded_text = sum(not token.is_control for token in written[1:])
        return WrittenAnswer(document, reply.finish_reason, decoded_text, measure(sequence), sequence.anomalies)
