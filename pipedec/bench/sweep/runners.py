"""How an answer of a sweep is measured: in this process, or by a cluster. Knows nothing of grids and rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

from pipedec.bench.breakdown import breakdown
from pipedec.bench.options import Tokenizes
from pipedec.bench.sweep.pipelines import Measurable, RunningShape
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.supervisor import Supervisor
from pipedec.core.completion import Metrics
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
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
    overran: float = 0.0
    breakdown: dict[str, float] | None = None
    logprobs: Sequence[Mapping[int, float]] | None = None


class Runner(ABC):
    """Measures answers of one pipeline; ``prompter`` decides whether a prompt fits."""

    prompter: Tokenizes

    @abstractmethod
    def answer(self, asked: PromptRequest) -> MeasuredAnswer:
        """Measure one answer. Raises RankLost or SchedulerLost if the cluster died."""


class OneProcess(Runner):
    """Decodes in this process (``LocalPipeline``). Times are computed if the pipeline is emulated, else measured.

    Verdicts prune as with the dispatch: they travel with the rows (windows), or all stages prune at once (single tasks).
    """

    def __init__(self, spec: PipelineSpec) -> None:
        experience = initial_experience(spec, chosen_device(spec.settings.cut.device))
        self._pipeline = LocalPipeline.load(spec, prunes="with the rows" if spec.window else "at once", experience=experience)
        self.prompter = load_prompter(spec)
        self._next_id = 0

    def answer(self, asked: PromptRequest) -> MeasuredAnswer:
        prompt = self.prompter.token_ids(asked.prompt, asked.raw, asked.sampling.max_tokens)
        assert asked.method is not None
        request = TokenizedRequest(self._next_id, prompt, asked.sampling, asked.method, make_options(asked.method, asked.options))
        self._next_id += 1
        verdicts = list(self._pipeline.run(request))
        token_ids = tuple(token for verdict in verdicts for token in verdict.tokens)
        answer = self._pipeline.last
        return MeasuredAnswer(
            len(prompt), token_ids, verdicts[-1].finished, answer.metrics,
            decode_ms=1000 * answer.metrics.decode_seconds,
            prefill_ms=1000 * answer.metrics.prefill_seconds,
            logprobs=answer.logprobs or None,
        )  # fmt: skip


class OnCluster(Runner):
    """Decodes on a cluster, in real time, which is divided by ``slow_motion``.

    ``connect`` returns it; it is called when the first answer is needed. Without a ``prompter``, the cluster is asked whether a
    prompt fits.
    """

    def __init__(self, connect: Callable[[], RunHandle], prompter: Tokenizes | None = None, slow_motion: float = 1.0) -> None:
        self._connect, self._slow_motion = connect, slow_motion
        self.prompter = prompter or self

    @cached_property
    def running(self) -> RunHandle:
        return self._connect()

    def token_ids(self, prompt: str | tuple[int, ...], raw: bool, max_tokens: int) -> tuple[int, ...]:
        """(), since only the cluster knows them. Raises UserError if the prompt and ``max_tokens`` do not fit."""
        self.running.check_accepts(PromptRequest(prompt, raw, "pp", SamplingParams(max_tokens=max_tokens)))
        return ()

    def answer(self, asked: PromptRequest) -> MeasuredAnswer:
        reply = self.running.client.follow(asked)
        completion = reply.completed()
        metrics = completion.metrics
        phases = breakdown(reply.trace, self.running.topology.num_stages) if asked.trace else None
        return MeasuredAnswer(
            completion.prompt_tokens, tuple(completion.token_ids), completion.finish_reason, metrics,
            decode_ms=1000 * metrics.decode_seconds / self._slow_motion,
            prefill_ms=1000 * metrics.prefill_seconds / self._slow_motion,
            overran=len(reply.overran) / max(1, metrics.timesteps, len(reply.overran)),  # prefill may overrun, too
            breakdown=phases and {name: time_ms / self._slow_motion for name, time_ms in phases.items()},
            logprobs=completion.logprobs,
        )  # fmt: skip


def connected(cluster: Supervisor) -> RunHandle:
    """The client's side of a cluster that has been started."""
    assert cluster.scheduler is not None
    return RunHandle.of(cluster.scheduler, cluster.run_id, cluster.check)


@contextmanager
def runner_of(shape: Measurable, clock: str) -> Iterator[Runner]:
    """The runner of a pipeline; ``computed`` decodes in this process. Processes start when the first answer is needed."""
    if isinstance(shape, RunningShape):
        yield OnCluster(lambda: shape.running)
    elif clock == "computed":
        yield OneProcess(shape.spec)
    else:
        emulation = shape.spec.emulation
        with ExitStack() as stack:
            yield OnCluster(
                lambda: connected(stack.enter_context(LocalCluster(shape.spec))), load_prompter(shape.spec),
                1.0 if emulation is None else emulation.slow_motion,
            )  # fmt: skip


MakeRunner = Callable[[Measurable, str], AbstractContextManager[Runner]]
