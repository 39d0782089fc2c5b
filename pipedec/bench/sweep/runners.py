"""Two ways to measure one answer of a sweep: real processes and the wall clock, or one process and the computed clock.

Owns clusters and pipelines while they run. Knows nothing of grids and result files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType

from pipedec.bench.sweep.breakdown import breakdown
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core import Metrics, PipedecError, Request
from pipedec.engine.local import LocalPipeline
from pipedec.engine.prefill import prefill_chunks
from pipedec.engine.spec import PipelineSpec
from pipedec.messages import PromptRequest
from pipedec.methods import make_options
from pipedec.model import ModelConfig
from pipedec.text.prompt import Prompter


@dataclass(frozen=True)
class Measured:
    """One answer and its cost; times are emulated milliseconds if the pipeline is emulated.

    Attributes:
        computed_ms: decoding time by arithmetic; None without emulation.
        overran: share of timesteps in which a rank's real work took longer than its emulated time.
        breakdown: ms per timestep by phase; None unless the request was traced.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    metrics: Metrics
    decode_ms: float
    prefill_ms: float
    computed_ms: float | None
    overran: float = 0.0
    breakdown: dict[str, float] | None = None


class OneProcess:
    """Decodes in this process (``LocalPipeline``). Times are computed if the pipeline is emulated, else measured."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._spec = spec
        self._pipeline = LocalPipeline.load(spec)
        self.prompter = Prompter(spec.target, ModelConfig.from_directory(spec.target).max_positions)
        self._next_id = 0

    def answer(self, asked: PromptRequest) -> Measured:
        prompt = self.prompter.token_ids(asked.prompt, asked.raw, asked.sampling.max_tokens)
        assert asked.method is not None
        request = Request(self._next_id, prompt, asked.sampling, asked.method, make_options(asked.method, asked.options))
        self._next_id += 1
        verdicts = list(self._pipeline.run(request))
        token_ids = tuple(token for verdict in verdicts for token in verdict.tokens)
        metrics, emulation = self._pipeline.metrics, self._spec.emulation
        computed_ms = self._pipeline.emulated_ms
        prefill_ms = 1000 * metrics.prefill_seconds
        if emulation is not None:
            prefill_ms = emulation.prefill_ms([len(chunk) for chunk in prefill_chunks(prompt)])
        decode_ms = 1000 * metrics.decode_seconds if computed_ms is None else computed_ms
        return Measured(
            len(prompt), token_ids, verdicts[-1].finished, replace(metrics), decode_ms, prefill_ms, computed_ms
        )  # fmt: skip


class RealProcesses:
    """Decodes with one process per rank and a Redis; emulated ranks sleep until their device would have finished.

    Every answer is compared with that of ``expected``, the same pipeline in this process, which also computes its emulated time.
    Use as a context manager.
    """

    def __init__(self, spec: PipelineSpec, expected: OneProcess) -> None:
        self._spec = spec
        self._cluster = LocalCluster(spec)
        self._expected = expected

    def __enter__(self) -> RealProcesses:
        self._cluster.start()
        assert self._cluster.scheduler is not None
        self._client = Client(self._cluster.scheduler, self._cluster.check)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cluster.stop() if kind is None else self._cluster.kill()

    def answer(self, asked: PromptRequest) -> Measured:
        expected = self._expected.answer(replace(asked, trace=False))
        completion = self._client.ask(asked)
        if tuple(completion.token_ids) != expected.token_ids:
            raise PipedecError(f"{asked.method} gave another answer in {self._spec.num_stages} processes than in one: a defect")
        metrics, emulation = completion.metrics, self._spec.emulation
        slow_motion = emulation.slow_motion if emulation else 1.0
        phases = breakdown(self._client.trace, self._spec.num_stages) if asked.trace else None
        return replace(
            expected,
            metrics=metrics,
            decode_ms=1000 * metrics.decode_seconds / slow_motion,
            prefill_ms=expected.prefill_ms if emulation else 1000 * metrics.prefill_seconds,
            overran=len(self._client.overran) / max(1, metrics.timesteps),
            breakdown=phases and {name: time_ms / slow_motion for name, time_ms in phases.items()},
        )
