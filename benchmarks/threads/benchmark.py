"""``python -m benchmarks.threads``: styles × methods × pipelines × prompts, one JSONL row per answer.

A style is one thread, the threads of a dialect, or one of another package. In one style every method and pipeline must generate
the same answer. Pipelines are emulated in this process, in computed time, or one cluster is running and its times are measured.
In this process each style has pipelines of its own, so that a method learns from answers of one kind only; an interruption loses
what ``pipedec-bestfirst`` learns. ``summary`` computes statistics of the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

from msgspec import structs

from benchmarks.output import Preset, SameAnswers, StageCounts
from pipedec.bench.options import Drawing, draw
from pipedec.bench.record import Grid, Row, SweepProgress, key_of, plain
from pipedec.bench.report.style import BASELINE
from pipedec.bench.sweep.pipelines import Measurable, ModelPair, RunningShape, check_is_real, emulated
from pipedec.client.run_handle import RunHandle
from pipedec.config import ClusterConfig
from pipedec.core.completion import Metrics
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.data import PromptSet
from pipedec.engine.build import load_prompter
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.flags import Help
from pipedec.messages.request import PromptRequest
from pipedec.methods import find_method, make_options
from pipedec.plan.spec import PipelineSpec
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect, Sequence, ThreadMetrics, load_dialect, measure
from pipedec.threads.sequences import Sequences

SCHEMA = "pipedec.threads/2"
SEQUENTIAL = "none"  # instead of a dialect, for answers in one thread


@dataclass(frozen=True)
class ThreadsConfig(Drawing):
    """The grid of a benchmark of decode threads. With a temperature, ``seed`` also seeds the tokens.

    ``running`` is a cluster to measure instead of emulated pipelines; ``pair.target`` then has its tokenizer. Raises UserError
    for an unknown method, dialect or preset, or a number below 1.
    """

    cluster: ClusterConfig
    preset: Preset | None = None
    stages: StageCounts = ()
    dialects: Annotated[tuple[str, ...], Help(f"Dialects by name or file; {SEQUENTIAL}: one thread, the baseline.")] = (
        SEQUENTIAL, "apar", "pasta",
    )  # fmt: skip
    methods: Annotated[tuple[str, ...], Help(f"Methods; speed-ups are over {BASELINE}.")] = (BASELINE, DEFAULT_METHOD)
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    pair: ModelPair = ModelPair()
    running: RunHandle | None = None

    def __post_init__(self) -> None:
        for method in self.methods:
            find_method(method) if self.running is None else self.running.check_method(method)
        check_fields(self)
        if self.running is not None:
            check_is_real(self.running)
        elif self.preset is None:
            raise UserError("nothing to measure: give --preset NAME, or --running for a cluster that is running")
        else:
            self.cluster.find_partition(self.preset)
        self.styles()

    def styles(self) -> dict[str, Style]:
        """The styles by name. Raises UserError for one that is named twice."""
        found = [self.style(name) for name in self.dialects]
        named = {style.name: style for style in found}
        if len(named) < len(found):
            raise UserError("--dialects names a dialect twice")
        return named

    def style(self, dialect: str) -> Style:
        """One thread, or a dialect by its name or file. Raises UserError for an unknown one."""
        return Style() if dialect == SEQUENTIAL else Style(load_dialect(dialect))

    def shapes(self) -> Iterator[Measurable]:
        if self.running is not None:
            yield RunningShape(self.running)
            return
        assert self.preset is not None
        for stages in self.stages or (None,):
            yield emulated(self.cluster, self.preset, stages, self.pair, own_work=self.own_work)

    def answers(self, shape: Measurable) -> ThreadAnswers:
        """The answers of a pipeline."""
        if not isinstance(shape, RunningShape):
            return LocalAnswers(shape.spec, self.styles())
        assert self.pair.target is not None
        return ClusterAnswers(shape.running, self.pair.target, self.styles())


def bench_threads(config: ThreadsConfig, prompt_sets: list[PromptSet], out: Path, progress: SweepProgress) -> list[Row]:
    """Measure the answers that ``out`` lacks; returns the rows of all answers of this configuration.

    Raises UserError if no prompt fits into the context, the target lacks a dialect's control tokens, or ``out`` holds rows of
    another schema; PipedecError if two methods or pipelines gave different answers in the same style.
    """
    shapes, styles = list(config.shapes()), config.styles()
    sampling = structs.replace(config.sampling, seed=config.seed) if config.sampling.is_stochastic else config.sampling
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
        answers = config.answers(shape)
        template = PromptRequest("", config.raw_prompts, sampling=sampling)
        prompts = draw(answers, prompt_sets, template, config.samples, config.seed)
        for prompt, dialect, method in product(prompts, styles, config.methods):
            identity = {
                "preset": shape.preset, "cluster": shape.cluster, "pair": shape.pair, "dialect": dialect, "method": method,
                "prompt_set": prompt.prompt_set, "prompt_index": prompt.index, "sampling": plain(prompt.request.sampling),
            }  # fmt: skip
            asked = [prompt.request.prompt, prompt.request.raw, styles[dialect].settings]
            request = structs.replace(prompt.request, method=method)
            grid.row(identity, asked, partial(measure_answer, answers, request, identity), check)
    return grid.rows


class ThreadAnswers(ABC):
    """Generates answers, each in one of ``styles``, and the figures of their rows."""

    def __init__(self, prompter: Prompter, styles: Mapping[str, Style]) -> None:
        self.prompter = prompter
        self.styles = styles

    def token_ids(self, prompt: str | tuple[int, ...], raw: bool, max_tokens: int) -> tuple[int, ...]:
        """The prompt in the style in which it is longest. Raises UserError like ``Prompter.token_ids``."""
        request = PromptRequest(prompt, raw, sampling=SamplingParams(max_tokens=max_tokens))
        return max((style.prompt(self.prompter, request) for style in self.styles.values()), key=len)

    @abstractmethod
    def generate(self, request: PromptRequest, style: str) -> Row:
        """The figures of the answer to ``request``."""


class LocalAnswers(ThreadAnswers):
    """Answers of pipelines in this process."""

    def __init__(self, spec: PipelineSpec, styles: Mapping[str, Style]) -> None:
        super().__init__(load_prompter(spec), styles)
        self._spec = spec
        self._pipelines: dict[str, LocalPipeline] = {}

    def generate(self, request: PromptRequest, style: str) -> Row:
        return self.styles[style].answer(self.pipeline(style), self.prompter, request)

    def pipeline(self, style: str) -> LocalPipeline:
        """The pipeline of a style's answers."""
        if style not in self._pipelines:
            self._pipelines[style] = LocalPipeline.load(self._spec)
        return self._pipelines[style]


class ClusterAnswers(ThreadAnswers):
    """Answers of a running cluster, whose tokenizer and config.json are in the directory ``target``, in measured time.

    Only the cluster knows how full its stages are: ``fill`` is empty.
    """

    def __init__(self, running: RunHandle, target: Path, styles: Mapping[str, Style]) -> None:
        limit = running.description.settings.limits.max_model_len
        super().__init__(Prompter(target, model_config(target).context_length, limit), styles)
        self._client = running.client
        self._sequences = Sequences(target)

    def generate(self, request: PromptRequest, style: str) -> Row:
        chosen = self.styles[style]
        prompt = chosen.prompt(self.prompter, request)
        asked = structs.replace(request, prompt=prompt, raw=True, threads=chosen.settings)
        completion = self._client.ask(asked)
        answer = self._sequences.maker(len(prompt), request.sampling, chosen.settings, tuple(completion.token_ids))()
        written = chosen.written(self.prompter, answer, str(completion.finish_reason))
        if completion.threads is not None:  # they count tokens past the end, too
            written["anomalies"] = completion.threads["anomalies"]
        return costs(len(prompt), completion.metrics, []) | written


def costs(prompt_tokens: int, metrics: Metrics, fill: list[list[int]]) -> Row:
    """The costs of an answer by one request; ``fill`` as in ``Style.answer``."""
    return {
        "requests": 1, "prompt_tokens": prompt_tokens, "cached_tokens": metrics.cached_tokens, "timesteps": metrics.timesteps,
        "hits": metrics.hits, "misses": metrics.misses, "prefill_ms": round(1000 * metrics.prefill_seconds, 3),
        "decode_ms": round(1000 * metrics.decode_seconds, 3), "prompts_ms": 0.0, "fill": fill,
    }  # fmt: skip


def sequential_metrics(prompt_tokens: int, tokens: int, text_tokens: int) -> ThreadMetrics:
    """The metrics of an answer in one thread."""
    attended, cached = (prompt_tokens + (text_tokens - 1) / 2 if text_tokens else 0.0), prompt_tokens + text_tokens
    return ThreadMetrics(
        1, tokens, text_tokens, tokens, text_tokens / tokens if tokens else 0.0, attended, attended, cached, cached
    )  # fmt: skip


def written_fields(
    document: list[tuple[object, int]],
    finish_reason: str,
    decoded_text: int,
    metrics: ThreadMetrics,
    anomalies: Mapping[str, int],
) -> Row:
    """The part of a row that does not depend on methods and pipelines: an answer's tokens and their statistics.

    Args:
        document: every token that was decoded or forced, each with the thread or the request that it belongs to. Answers are
            equal if their documents are.
        finish_reason: of the answer, as in ``Verdict``; ``length`` if any part of it ended at ``max_tokens``.
        decoded_text: text tokens that were decoded after the answer's first token.
        metrics: of parallel decoding and attention.
        anomalies: a count by name.
    """
    return {
        "document": key_of(document), "finish_reason": finish_reason, "decoded_text": decoded_text,
        "metrics": asdict(metrics), "anomalies": dict(anomalies),
    }  # fmt: skip


@dataclass(frozen=True)
class Style:
    """One way to answer a prompt: by one request, in one thread or in the decode threads of a dialect."""

    dialect: Dialect | None = None

    @property
    def name(self) -> str:
        """In tables and flags."""
        return self.dialect.name if self.dialect else SEQUENTIAL

    @property
    def settings(self) -> str | None:
        """Everything the answer depends on besides prompt, model and sampling; None if there is nothing else."""
        return self.dialect.to_json() if self.dialect else None

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        """The prompt of the first request for the answer to ``request``. Raises UserError like ``Prompter.token_ids``."""
        dialect = self.dialect.name if self.dialect else None
        return prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens, dialect)

    def answer(self, pipeline: LocalPipeline, prompter: Prompter, request: PromptRequest) -> Row:
        """The figures of the answer to ``request``: its costs, and ``written_fields``.

        An answer shares no keys and values with one before it. Times begin with the first token; ``fill`` has the number of rows
        of each group in each timestep from then on. Raises UserError like ``LocalPipeline.run_all``.
        """
        pipeline.forget_prefixes()
        asked = self.tokenized(prompter, request)
        for _ in pipeline.run_all({1: [asked]}):
            pass
        answer = pipeline.answers[0]
        fill = pipeline.fill[len(pipeline.fill) - answer.metrics.timesteps :]
        written = self.written(prompter, answer.sequence, str(answer.finished))
        return costs(len(asked.prompt_token_ids), answer.metrics, fill) | written

    def tokenized(self, prompter: Prompter, request: PromptRequest, number: int = 0) -> TokenizedRequest:
        """The first request for the answer to ``request``."""
        assert request.method is not None
        prompt, options = self.prompt(prompter, request), make_options(request.method, request.options)
        return TokenizedRequest(number, prompt, request.sampling, request.method, options, threads=self.settings)

    def written(self, prompter: Prompter, sequence: Sequence, finish_reason: str) -> Row:
        """``written_fields`` of an answer by one request."""
        document: list[tuple[object, int]]
        tokens = sequence.document()
        if self.dialect is None:
            special = prompter.tokenizer.all_special_ids
            is_text = [token.token_id not in special for token in tokens]
            document = [(0, token.token_id) for token in tokens]
            of_threads, counts = sequential_metrics(sequence.prompt_length, len(is_text), sum(is_text)), {}
        else:
            is_text = [not token.is_control for token in tokens]
            # Thread paths, not numbers: numbers depend on the order in which threads opened.
            document = [(list(sequence.threads[token.thread].path), token.token_id) for token in tokens]
            of_threads, counts = measure(sequence), dict(sequence.anomalies)
        return written_fields(document, finish_reason, sum(is_text[1:]), of_threads, counts)
