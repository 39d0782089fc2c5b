"""How an answer of a sweep is measured: in one process, by a cluster started here, by one that runs, by one launched for it.

Owns clusters and pipelines while they run. Knows nothing of grids and rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType

from msgspec import structs

from pipedec.bench.breakdown import breakdown
from pipedec.bench.options import AskedPrompts, Tokenizes
from pipedec.bench.sweep.pipelines import Measurable, Shape
from pipedec.client.running import Running
from pipedec.cluster.launched import LaunchedCluster
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.supervisor import Supervisor
from pipedec.config import ClusterConfig
from pipedec.core.completion import Metrics
from pipedec.core.request import TokenizedRequest
from pipedec.engine.build import load_prompter
from pipedec.engine.devices import chosen_device
from pipedec.engine.experience_files import initial_experience
from pipedec.engine.local import LocalPipeline
from pipedec.messages.request import PromptRequest
from pipedec.methods import make_options
from pipedec.plan.spec import PipelineSpec


@dataclass(frozen=True)
class MeasuredAnswer:
    """One answer and its cost; times are emulated milliseconds if the pipeline is emulated.

    Attributes:
        computed_ms: decoding time by arithmetic; None without emulation.
        overran: share of timesteps in which a rank's real work took longer than its emulated time.
        breakdown: ms per timestep by phase; None unless the request was traced.
        logprobs: as in ``Completion``.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    metrics: Metrics
    decode_ms: float
    prefill_ms: float
    computed_ms: float | None = None
    overran: float = 0.0
    breakdown: dict[str, float] | None = None
    logprobs: Sequence[Mapping[int, float]] | None = None


class Runner(AbstractContextManager["Runner"]):
    """Measures answers of one pipeline; ``prompter`` decides whether a prompt fits. What it starts ends with the context."""

    prompter: Tokenizes

    def __init__(self) -> None:
        self._references: dict[PromptRequest, MeasuredAnswer] = {}
        self._stack = ExitStack()

    def answer(self, asked: PromptRequest) -> MeasuredAnswer:
        """Measure one answer. Raises RankLost or SchedulerLost if the cluster died."""
        measured = self._decode(asked)
        if asked.method == "pp":
            self._references[_question(asked)] = measured
        return measured

    def reference(self, asked: PromptRequest) -> MeasuredAnswer:
        """The answer of ``pp`` to this question; the method of ``asked`` does not matter."""
        question = _question(asked)
        if question not in self._references:
            self.answer(question)
        return self._references[question]

    @abstractmethod
    def _decode(self, asked: PromptRequest) -> MeasuredAnswer: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)


def _question(asked: PromptRequest) -> PromptRequest:
    return structs.replace(asked, method="pp", options={}, trace=False)


class OneProcess(Runner):
    """Decodes in this process (``LocalPipeline``). Times are computed if the pipeline is emulated, else measured.

    Verdicts prune as with the dispatch: they travel with the rows (windows), or all stages prune at once (single tasks).
    """

    def __init__(self, spec: PipelineSpec) -> None:
        super().__init__()
        self._spec = spec
        experience = initial_experience(spec, chosen_device(spec.settings.cut.device))
        self._pipeline = LocalPipeline.load(spec, prunes="with the rows" if spec.window else "at once", experience=experience)
        self.computed = self
        self.prompter = load_prompter(spec)
        self._next_id = 0

    def _decode(self, asked: PromptRequest) -> MeasuredAnswer:
        prompt = self.prompter.token_ids(asked.prompt, asked.raw, asked.sampling.max_tokens)
        assert asked.method is not None
        request = TokenizedRequest(self._next_id, prompt, asked.sampling, asked.method, make_options(asked.method, asked.options))
        self._next_id += 1
        verdicts = list(self._pipeline.run(request))
        token_ids = tuple(token for verdict in verdicts for token in verdict.tokens)
        answer = self._pipeline.last
        metrics = answer.metrics
        decode_ms, prefill_ms = 1000 * metrics.decode_seconds, 1000 * metrics.prefill_seconds
        computed_ms = None if self._spec.emulation is None else decode_ms
        return MeasuredAnswer(
            len(prompt), token_ids, verdicts[-1].finished, metrics, decode_ms, prefill_ms, computed_ms,
            logprobs=answer.logprobs or None,
        )  # fmt: skip


class OnCluster(Runner):
    """Decodes on a cluster, in real time.

    ``connect`` finds or starts it when the first answer is needed; what it enters into the stack ends with this runner.
    """

    def __init__(self, connect: Callable[[ExitStack], Running]) -> None:
        super().__init__()
        self._connect = connect

    @cached_property
    def running(self) -> Running:
        return self._connect(self._stack)

    def _decode(self, asked: PromptRequest) -> MeasuredAnswer:
        reply = self.running.client.follow(asked)
        completion = reply.completed()
        metrics = completion.metrics
        return MeasuredAnswer(
            completion.prompt_tokens, tuple(completion.token_ids), completion.finish_reason, metrics,
            decode_ms=1000 * metrics.decode_seconds,
            prefill_ms=1000 * metrics.prefill_seconds,
            overran=len(reply.overran) / max(1, metrics.timesteps, len(reply.overran)),  # prefill may overrun, too
            breakdown=breakdown(reply.trace, self.running.topology.num_stages) if asked.trace else None,
            logprobs=completion.logprobs,
        )  # fmt: skip


def started(cluster: Supervisor, stack: ExitStack) -> Running:
    """Start a cluster, which ends with ``stack``, and connect to it."""
    stack.enter_context(cluster)
    assert cluster.scheduler is not None
    return Running.of(cluster.scheduler, cluster.run_id, cluster.check)


class RealProcesses(OnCluster):
    """Decodes with one process per rank and a Redis; emulated ranks sleep until their device would have finished.

    The same pipeline in this process gives the reference answers and computes the emulated times.
    """

    def __init__(self, spec: PipelineSpec) -> None:
        super().__init__(lambda stack: started(LocalCluster(spec), stack))
        self._emulation = spec.emulation
        self.computed = OneProcess(spec)
        self.prompter = self.computed.prompter

    def reference(self, asked: PromptRequest) -> MeasuredAnswer:
        return self.computed.reference(asked)

    def _decode(self, asked: PromptRequest) -> MeasuredAnswer:
        measured = super()._decode(asked)
        if self._emulation is None:
            return measured
        expected, slow_motion = self.computed.answer(structs.replace(asked, trace=False)), self._emulation.slow_motion
        phases = measured.breakdown
        return replace(
            measured,
            decode_ms=measured.decode_ms / slow_motion,
            prefill_ms=measured.prefill_ms / slow_motion,
            computed_ms=expected.computed_ms,
            breakdown=phases and {name: time_ms / slow_motion for name, time_ms in phases.items()},
        )


MakeRunner = Callable[[Measurable, str, Path], Runner]


def runner_of(
    shape: Measurable, clock: str, prompts: Path, launch: Callable[[ClusterConfig, str], Supervisor] = LaunchedCluster
) -> Runner:
    """The runner of a pipeline, which starts it when the first answer is needed; ``computed`` decodes in this process.

    A running or launched cluster decides itself whether a prompt fits; the file ``prompts`` keeps its replies (see
    ``AskedPrompts``). ``launch`` creates the cluster of a partition.
    """
    if isinstance(shape, Shape):
        return OneProcess(shape.spec) if clock == "computed" else RealProcesses(shape.spec)
    source, partition = shape.source, shape.preset

    def connect(stack: ExitStack) -> Running:
        if isinstance(source, Running):
            return source
        assert partition is not None
        return started(launch(source, partition), stack)

    runner = OnCluster(connect)
    runner.prompter = AskedPrompts(lambda request: runner.running.check_accepts(request), prompts, shape.scope)
    return runner
