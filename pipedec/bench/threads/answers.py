"""One answer in decode threads, or in one thread, by a pipeline in this process, and the figures of its row.

Owns the pipelines, one for each dialect, so that a method learns from answers of one kind. Times are emulated, by arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from pipedec.bench.record import Row, key_of
from pipedec.core import Request
from pipedec.engine.local import LocalPipeline
from pipedec.engine.prefill import prefill_chunks
from pipedec.engine.spec import PipelineSpec
from pipedec.messages import PromptRequest
from pipedec.model import ModelConfig
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect, Sequence, ThreadMetrics, measure


class ThreadAnswers:
    """Answers of one emulated pipeline in several dialects; None is one thread."""

    def __init__(self, spec: PipelineSpec, dialects: Mapping[str, Dialect | None]) -> None:
        self._spec = spec
        self._dialects = dialects
        self._prompter = Prompter(spec.target, ModelConfig.from_directory(spec.target).max_positions)
        self._special = frozenset(self._prompter.tokenizer.all_special_ids)
        self._pipelines: dict[str, LocalPipeline] = {}

    def token_ids(self, prompt: str, raw: bool, max_tokens: int) -> tuple[int, ...]:
        """The prompt in the dialect that makes it longest. Raises UserError as ``Prompter.token_ids`` does."""
        return max((self._prompt(prompt, raw, max_tokens, name) for name in self._dialects), key=len)

    def ask(self, asked: PromptRequest, dialect: str) -> Row:
        """The figures of the answer to ``asked`` in a dialect."""
        prompt = self._prompt(asked.prompt, asked.raw, asked.sampling.max_tokens, dialect)
        grammar, pipeline = self._dialects[dialect], self._pipeline(dialect)
        assert asked.method is not None
        threads = None if grammar is None else grammar.to_json()
        verdicts = list(pipeline.run(Request(0, prompt, asked.sampling, asked.method, asked.tree, threads=threads)))
        tokens = [token for verdict in verdicts for token in verdict.tokens]
        said = self._sequential(len(prompt), tokens) if pipeline.sequence is None else _threaded(pipeline.sequence)
        return {
            "prompt_tokens": len(prompt),
            **said,
            "finish_reason": verdicts[-1].finished,
            "timesteps": pipeline.metrics.timesteps,
            "hits": pipeline.metrics.hits,
            "misses": pipeline.metrics.misses,
            **self._times(pipeline, prompt),
            "fill": pipeline.fill,
        }

    def _prompt(self, prompt: str, raw: bool, max_tokens: int, dialect: str) -> tuple[int, ...]:
        grammar = self._dialects[dialect]
        return self._prompter.token_ids(prompt, raw, max_tokens, None if grammar is None else grammar.name)

    def _pipeline(self, dialect: str) -> LocalPipeline:
        """Loaded when the first answer is needed: what is measured already loads none."""
        if dialect not in self._pipelines:
            self._pipelines[dialect] = LocalPipeline.load(self._spec)
        return self._pipelines[dialect]

    def _times(self, pipeline: LocalPipeline, prompt: tuple[int, ...]) -> Row:
        assert self._spec.emulation is not None and pipeline.emulated_ms is not None
        prefill_ms = self._spec.emulation.prefill_ms([len(chunk) for chunk in prefill_chunks(prompt)])
        return {"decode_ms": round(pipeline.emulated_ms, 3), "prefill_ms": round(prefill_ms, 3)}

    def _sequential(self, prompt_tokens: int, tokens: list[int]) -> Row:
        is_text = [token not in self._special for token in tokens]
        metrics = sequential_metrics(prompt_tokens, len(tokens), sum(is_text))
        return {"document": key_of([[0, token] for token in tokens]), "decoded_text": sum(is_text[1:])} | _counted(metrics, {})


def sequential_metrics(prompt_tokens: int, tokens: int, text_tokens: int) -> ThreadMetrics:
    """Of an answer in one thread."""
    attended, cached = (prompt_tokens + (text_tokens - 1) / 2 if text_tokens else 0.0), prompt_tokens + text_tokens
    return ThreadMetrics(
        1, tokens, text_tokens, tokens, text_tokens / tokens if tokens else 0.0, attended, attended, cached, cached
    )  # fmt: skip


def _threaded(sequence: Sequence) -> Row:
    """Thread numbers depend on who opened first; paths do not."""
    written = sequence.document()
    document = [[list(sequence.threads[token.thread].path), token.token_id] for token in written]
    decoded_text = sum(not token.is_control for token in written[1:])
    return {"document": key_of(document), "decoded_text": decoded_text} | _counted(measure(sequence), sequence.anomalies)


def _counted(metrics: ThreadMetrics, anomalies: dict[str, int]) -> Row:
    return {"metrics": asdict(metrics), "anomalies": anomalies}
