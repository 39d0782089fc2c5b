"""How an answer of a sweep is measured: in one process, by a cluster started here, by one that runs, by one launched for it.

Owns clusters and pipelines while they run. Knows nothing of grids and result files, but for the file that keeps which prompts a
cluster refuses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from msgspec import structs

from pipedec.bench.breakdown import breakdown
from pipedec.bench.prompts import AskedPrompts, Tokenizes
from pipedec.bench.sweep.pipelines import LaunchedShape, Measurable, RunningShape, Shape
from pipedec.client.running import Running
from pipedec.cluster.launched import LaunchedCluster
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.supervisor import Supervisor
from pipedec.config import ClusterConfig
from pipedec.core import Metrics, Request
from pipedec.engine.local import LocalPipeline
from pipedec.messages import PromptRequest
from pipedec.methods import make_options
from pipedec.model import ModelConfig
from pipedec.plan.spec import PipelineSpec
from pipedec.text.prompt import Prompter


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
    """Measures answers of one pipeline. What it has started ends with the context.

    Attributes:
        prompter: says whether a prompt fits.
    """

    prompter: Tokenizes

    def __init__(self) -> None:
        self._references: dict[PromptRequest, MeasuredAnswer] = {}

    def answer(self, asked: PromptRequest) -> MeasuredAnswer:
        """Measure one answer.

        Raises:
            RankLost, SchedulerLost: the cluster died.
        """
        measured = self._decode(asked)
        if asked.method == "pp":
            self._references[_question(asked)] = measured
        return measured

    def reference(self, asked: PromptRequest) -> MeasuredAnswer:
        """What ``pp`` answers to this question, by whatever method it is asked."""
        question = _question(asked)
        if question not in self._references:
            self.answer(question)
        return self._references[question]

    @abstractmethod
    def _decode(self, asked: PromptRequest) -> MeasuredAnswer: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return  # a subclass that starts something ends it


def _question(asked: PromptRequest) -> PromptRequest:
    return structs.replace(asked, method="pp", options={}, trace=False)


class OneProcess(Runner):
    """Decodes in this process (``LocalPipeline``). Times are computed if the pipeline is emulated, else measured.

    Verdicts prune as with the dispatch: they travel with the rows (windows), or all stages prune at once (single tasks).
    """

    def __init__(self, spec: PipelineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._pipeline = LocalPipeline.load(spec, prunes="with the rows" if spec.window else "at once")
        self.prompter: Prompter = Prompter(spec.target, ModelConfig.from_directory(spec.target).max_positions)
        self._next_id = 0

    @property
    def computed(self) -> OneProcess:
        """Answers with computed times."""
        return self

    def _decode(self, asked: PromptRequest) -> MeasuredAnswer:
        prompt = self.prompter.token_ids(asked.prompt, asked.raw, asked.sampling.max_tokens)
        assert asked.method is not None
        request = Request(self._next_id, prompt, asked.sampling, asked.method, make_options(asked.method, asked.options))
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
    """Decodes on a cluster that runs, in real time."""

    def __init__(self, running: Running, prompter: Tokenizes) -> None:
        super().__init__()
        self.prompter = prompter
        self._running = running

    def _decode(self, asked: PromptRequest) -> MeasuredAnswer:
        reply = self._running.client.follow(asked)
        completion = reply.completed()
        metrics = completion.metrics
        return MeasuredAnswer(
            completion.prompt_tokens, tuple(completion.token_ids), completion.finish_reason, metrics,
            decode_ms=1000 * metrics.decode_seconds,
            prefill_ms=1000 * metrics.prefill_seconds,
            overran=len(reply.overran) / max(1, metrics.timesteps, len(reply.overran)),  # prefill may overrun, too
            breakdown=breakdown(reply.trace, self._running.topology.num_stages) if asked.trace else None,
            logprobs=completion.logprobs,
        )  # fmt: skip


class OnStartedCluster(Runner):
    """Decodes on a cluster that is started for the first answer and ends with this.

    Args:
        make: creates the cluster.
    """

    def __init__(self, make: Callable[[], Supervisor]) -> None:
        super().__init__()
        self._make = make
        self._stack = ExitStack()
        self._started: tuple[Running, OnCluster] | None = None

    @property
    def running(self) -> Running:
        """Starts the cluster if it does not run yet."""
        return self._cluster()[0]

    def _decode(self, asked: PromptRequest) -> MeasuredAnswer:
        return self._cluster()[1].answer(asked)

    def _cluster(self) -> tuple[Running, OnCluster]:
        if self._started is None:
            cluster = self._stack.enter_context(self._make())
            assert cluster.scheduler is not None
            running = Running.of(cluster.scheduler, cluster.run_id, cluster.check)
            self._started = running, OnCluster(running, self.prompter)
        return self._started

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)


class RealProcesses(OnStartedCluster):
    """Decodes with one process per rank and a Redis; emulated ranks sleep until their device would have finished.

    The same pipeline in this process gives the reference answers and computes the emulated times.
    """

    def __init__(self, spec: PipelineSpec) -> None:
        super().__init__(lambda: LocalCluster(spec))
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


class Launched(OnStartedCluster):
    """Decodes on a partition of a ``cluster.yaml``, launched on its hosts.

    Args:
        launch: creates the cluster of a partition.
    """

    def __init__(
        self, config: ClusterConfig, partition: str, prompts: Path, scope: str,
        launch: Callable[[ClusterConfig, str], Supervisor] = LaunchedCluster,
    ) -> None:  # fmt: skip
        super().__init__(lambda: launch(config, partition))
        self.prompter = AskedPrompts(lambda request: self.running.check_accepts(request), prompts, scope)


MakeRunner = Callable[[Measurable, str, Path], Runner]


def runner_of(shape: Measurable, clock: str, prompts: Path) -> Runner:
    """The runner of a pipeline, which starts it when the first answer is needed.

    Args:
        clock: ``computed`` decodes in this process.
        prompts: the file that keeps which prompts the cluster refuses (see ``AskedPrompts``).
    """
    match shape:
        case RunningShape(running=running):
            return OnCluster(running, AskedPrompts(running.check_accepts, prompts, shape.scope))
        case LaunchedShape(config=config, partition=partition):
            return Launched(config, partition, prompts, shape.scope)
        case Shape(spec=spec):
            return OneProcess(spec) if clock == "computed" else RealProcesses(spec)
