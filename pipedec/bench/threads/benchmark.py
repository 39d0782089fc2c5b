"""``pipedec bench threads``: styles × methods × stage counts × prompts on emulated pipelines, one JSONL row per answer.

A style is one thread, the threads of a dialect, or one of another package. In one style every method and pipeline must generate
the same answer. Each style has pipelines of its own, so that a method learns from answers of one kind only; an interruption loses
what ``pipedec-bestfirst`` learns. Times are computed, not waited for. ``summary`` computes statistics of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Protocol

from msgspec.structs import replace

from pipedec.bench.grid import Grid, SameAnswers, SweepProgress
from pipedec.bench.options import Drawing, Preset, StageCounts
from pipedec.bench.prompts import draw
from pipedec.bench.record import Row, key_of, plain
from pipedec.bench.report.style import BASELINE
from pipedec.bench.sweep.pipelines import ModelPair, Shape, emulated
from pipedec.config import ClusterConfig
from pipedec.core import DEFAULT_METHOD, Request, SamplingParams, UserError
from pipedec.data import PromptSet
from pipedec.engine.build import load_prompter
from pipedec.engine.local import LocalPipeline
from pipedec.flags import Help, check_fields
from pipedec.messages import PromptRequest
from pipedec.methods import find_method, make_options
from pipedec.plan.spec import PipelineSpec
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect, ThreadMetrics, load_dialect, measure
from pipedec.threads import Sequence as ThreadSequence

SCHEMA = "pipedec.threads/2"
SEQUENTIAL = "none"  # instead of a dialect, for answers in one thread


@dataclass(frozen=True)
class ThreadsConfig(Drawing):
    """The grid of a benchmark of decode threads. With a temperature, ``seed`` also seeds the tokens.

    Raises UserError for an unknown method, dialect or preset, or a number below 1.
    """

    cluster: ClusterConfig
    preset: Preset
    stages: StageCounts = ()
    dialects: Annotated[tuple[str, ...], Help(f"Dialects by name or file; {SEQUENTIAL}: one thread, the baseline.")] = (
        SEQUENTIAL, "apar", "pasta",
    )  # fmt: skip
    methods: Annotated[tuple[str, ...], Help(f"Methods; speed-ups are over {BASELINE}.")] = (BASELINE, DEFAULT_METHOD)
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    pair: ModelPair = ModelPair()

    def __post_init__(self) -> None:
        for method in self.methods:
            find_method(method)
        check_fields(self)
        self.cluster.find_partition(self.preset)
        self.styles()

    def styles(self) -> dict[str, Style]:
        """By name."""
        found = [self.style(name) for name in self.dialects]
        named = {style.name: style for style in found}
        if len(named) < len(found):
            raise UserError("--dialects names a dialect twice")
        return named

    def style(self, dialect: str) -> Style:
        """One thread, or a dialect by its name or file. Raises UserError for an unknown one."""
        return OneThread() if dialect == SEQUENTIAL else InThreads(load_dialect(dialect))

    def shapes(self) -> Iterator[Shape]:
        for stages in self.stages or (None,):
            yield emulated(self.cluster, self.preset, stages, self.pair, own_work=self.own_work)


def bench_threads(config: ThreadsConfig, prompt_sets: list[PromptSet], out: Path, progress: SweepProgress) -> list[Row]:
    """Measure the answers that are missing in ``out``; returns the rows of all answers of this configuration.

    Raises:
        UserError: no prompt fits into the context, the target lacks a dialect's control tokens, or ``out`` contains rows of
            another schema.
        PipedecError: two methods or pipelines gave different answers in the same style.
    """
    shapes, styles = list(config.shapes()), config.styles()
    sampling = replace(config.sampling, seed=config.seed) if config.sampling.is_stochastic else config.sampling
    grid, same = Grid(SCHEMA, out, progress), SameAnswers()

    def check(row: Row) -> None:
        """The answer equals that of the first method on the first pipeline."""
        question = row["prompt_set"], row["prompt_index"], row["dialect"]
        name = f"to prompt {row['prompt_index']} of {row['prompt_set']}, dialect {row['dialect']}"
        same.check(question, (row["document"], row["finish_reason"]), row, name)

    def measure_answer(answers: ThreadAnswers, request: PromptRequest, identity: Row) -> Row:
        figures = answers.generate(request, identity["dialect"])
        check({**identity, **figures})  # before it is written
        return figures

    per_cell = sum(min(config.samples, len(one.prompts)) for one in prompt_sets)
    progress.start(len(shapes) * len(styles) * len(config.methods) * per_cell)
    for shape in shapes:
        progress.busy(shape.label)
        answers = ThreadAnswers(shape.spec, styles)
        template = PromptRequest("", config.raw_prompts, sampling=sampling)
        prompts = draw(answers, prompt_sets, template, config.samples, config.seed)
        for prompt, dialect, method in product(prompts, styles, config.methods):
            identity = {
                "preset": shape.preset, "cluster": shape.cluster, "pair": shape.pair, "dialect": dialect, "method": method,
                "prompt_set": prompt.prompt_set, "prompt_index": prompt.index, "sampling": plain(prompt.request.sampling),
            }  # fmt: skip
            asked = [prompt.request.prompt, prompt.request.raw, styles[dialect].settings]
            request = replace(prompt.request, method=method)
            grid.row(identity, asked, partial(measure_answer, answers, request, identity), check)
    return grid.rows


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
        if style not in self._pipelines:
            self._pipelines[style] = LocalPipeline.load(self._spec)
        exchange = DecodeRounds(self._pipelines[style], self._prompter, request)
        written = self._styles[style].answer(exchange)
        return {**exchange.costs.to_row(), **written.to_row()}


@dataclass
class Costs:
    """The costs of all requests of one answer together.

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
        times = {name: round(getattr(self, name), 3) for name in ("prefill_ms", "decode_ms", "prompts_ms")}
        return {**vars(self), **times}


@dataclass(frozen=True)
class DecodedReply:
    """One request's tokens in the order of decoding, with the end token if there is one, and its decode threads."""

    prompt_tokens: int
    token_ids: tuple[int, ...]
    sequence: ThreadSequence
    finish_reason: str


class DecodeRounds:
    """One answer: a first request, and rounds of further ones, each round decoded together when what came before has ended.

    The requests share the keys and values of equal beginnings with each other, but with no answer before this one. ``max_tokens``
    holds for every request; each draws with a seed of its own. ``costs`` are those of all requests so far.
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
        """The first request's reply; it may open decode threads in the dialect ``threads`` (``Dialect.to_json``)."""
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
        requests = []
        for number, prompt in enumerate(prompts):
            sampling = self.request.sampling
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + self.costs.requests + number)
            requests.append(Request(number, prompt, sampling, method, self._options, threads=threads))
        for _ in self._pipeline.run_all({1: requests}):
            pass
        replies, began_ms, ended_ms = [], 0.0, 0.0
        for number, prompt in enumerate(prompts):
            answer = self._pipeline.answers[number]
            metrics = answer.metrics
            self.costs.requests += 1
            self.costs.prompt_tokens += len(prompt)
            self.costs.cached_tokens += metrics.cached_tokens
            self.costs.hits += metrics.hits
            self.costs.misses += metrics.misses
            began_ms = max(began_ms, 1000 * metrics.prefill_seconds)
            ended_ms = max(ended_ms, 1000 * metrics.prefill_seconds + 1000 * metrics.decode_seconds)
            replies.append(DecodedReply(len(prompt), tuple(answer.token_ids), answer.sequence, str(answer.finished)))
        return replies, ended_ms, began_ms

    def _count(self, timesteps: int, decode_ms: float) -> None:
        """The last timesteps of a run."""
        self.costs.timesteps += timesteps
        self.costs.decode_ms += decode_ms
        self.costs.fill += self._pipeline.fill[len(self._pipeline.fill) - timesteps :]


@dataclass(frozen=True)
class WrittenAnswer:
    """The part of a row that does not depend on methods and pipelines: an answer's tokens and their statistics.

    Attributes:
        document: every token that was decoded or forced, each with the thread or the request that it belongs to. Answers are
            equal if their documents are.
        finish_reason: of the answer, as in ``Verdict``; ``length`` if any part of it ended at ``max_tokens``.
        decoded_text: text tokens that were decoded after the answer's first token.
        metrics: of parallel decoding and attention.
        anomalies: a count by name.
    """

    document: list[tuple[object, int]]
    finish_reason: str
    decoded_text: int
    metrics: ThreadMetrics
    anomalies: Mapping[str, int] = field(default_factory=dict)

    def to_row(self) -> Row:
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
    """One way to answer a prompt.

    Attributes:
        name: in tables and flags.
        settings: everything that the answer depends on besides prompt, model and sampling, as text; None for nothing.
    """

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> str | None: ...

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        """The prompt of the first request for the answer to ``request``. Raises UserError like ``Prompter.token_ids``."""

    def answer(self, exchange: DecodeRounds) -> WrittenAnswer:
        """The answer to ``exchange.request``. Raises UserError like ``LocalPipeline.run_all``."""


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
