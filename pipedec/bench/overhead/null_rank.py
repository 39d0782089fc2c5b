"""One rank of the overhead measurement: the real rank loop with a stage that computes nothing, then the bare messages.

The stages have no layers, and rank 0 has neither draft nor trees: its rows are always accepted. Queue, tasks, messages, transfers
and the stages' workers are real, so that what remains of a timestep is its fixed cost. ``benchmark`` combines the ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from pipedec.bench.overhead.bare_transport import bare_timesteps
from pipedec.cluster.lease import LeaseKeeper
from pipedec.cluster.place import RankPlace
from pipedec.config import Settings
from pipedec.core.errors import SchedulerLost
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import EMPTY, NewRequest, RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.decoding import Scheduler as Batch
from pipedec.decoding import TimestepTiming
from pipedec.directories import reference_pair
from pipedec.engine.admission import Admission
from pipedec.engine.draft_loop import DraftLoop
from pipedec.engine.output import Answer as RunningAnswer
from pipedec.engine.rank_tasks import Wiring
from pipedec.engine.stage_loop import StageLoop
from pipedec.faults import RequestFaults
from pipedec.messages.run import RunDescription
from pipedec.model import KVCache, KVPool, LaneRows, StageModel
from pipedec.plan.spec import DISPATCHES
from pipedec.scheduler import ClientScheduler, RankScheduler, connect
from pipedec.scheduler.protocol import RankMessage
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.stage.final import FinalLane
from pipedec.text.prompt import Prompter
from pipedec.threads import NewSequence, replay
from pipedec.threads import Sequence as ThreadSequence
from pipedec.threads.sequences import Sequences
from pipedec.topology import Topology
from pipedec.tracing import Tracer
from pipedec.transport.rendezvous import Rendezvous, file_store
from pipedec.transport.torch_distributed import TorchTransport
from pipedec.tree import Forest

WARM_UP = 5
PEER_SECONDS = 60.0
_TOKEN = 7  # of all prompts and answers
_SLOTS = 2**20  # of pools that take no memory
_QUEUE_SECONDS = 10.0


@dataclass(frozen=True)
class RankPlan:
    """The measurement of one rank; equal on all ranks except ``rank``. ``redis_url`` contains a password: never print it."""

    rank: int
    stages: int
    rows: tuple[int, ...]
    timesteps: int
    hidden_size: int
    repeats: int
    dispatch: str
    redis_url: str
    run_id: str
    meeting: Path


@dataclass(frozen=True)
class RankSample:
    """One rank's figures of one repeat with ``rows`` rows.

    Attributes:
        kind: ``"pipedec"``, or ``"raw"`` for the bare messages.
        timesteps_ms: duration of each timestep on this rank's clock.
        round_trips: Redis commands per timestep.
        cpu_ms: CPU time of this process per timestep, all threads.
        redis_cpu_ms: CPU time of the Redis server per timestep; rank 0 only.
    """

    kind: str
    rows: int
    timesteps_ms: list[float]
    round_trips: float = 0.0
    cpu_ms: float = 0.0
    redis_cpu_ms: float = 0.0


def measure_rank(plan: RankPlan, report: Callable[[RankSample], None]) -> None:
    """Alternate between the pipeline and the bare messages, ``repeats`` times; report a sample of each for every number of rows.

    Raises PipedecError if a peer or Redis was lost.
    """
    torch.set_num_threads(1)
    rendezvous = Rendezvous(plan.rank, plan.stages + 1, file_store(plan.meeting, plan.stages + 1), PEER_SECONDS, "lo")
    transport = TorchTransport("gloo", plan.rank, plan.hidden_size, torch.float32, torch.device("cpu"), depth=plan.stages)
    transport.join(rendezvous)
    try:
        for number in range(plan.repeats):
            for sample in _pipeline_samples(plan, f"{plan.run_id}-{number}", transport):
                report(sample)
            for rows in plan.rows:
                bare_timesteps(transport, rows, plan.hidden_size, torch.float32, WARM_UP)
                cpu = time.process_time()
                clock = bare_timesteps(transport, rows, plan.hidden_size, torch.float32, plan.timesteps + 1)
                cpu_ms = 1000 * (time.process_time() - cpu) / (plan.timesteps + 1)
                report(RankSample("raw", rows, _intervals_ms(clock), cpu_ms=cpu_ms))
    finally:
        transport.close()


def _pipeline_samples(plan: RankPlan, run_id: str, transport: TorchTransport) -> list[RankSample]:
    """One run: a request for each number of rows."""
    topology = Topology.even(plan.stages, plan.stages)
    scheduler = RankScheduler(connect(plan.redis_url), run_id, topology)
    sequences = Sequences(reference_pair() / "target")  # the answers of stages that compute nothing ignore them
    wiring = Wiring(scheduler, transport, topology, Tracer(plan.rank), sequences, window=DISPATCHES[plan.dispatch])
    lease = LeaseKeeper(scheduler, RankPlace(plan.rank, plan.stages + 1, plan.rank, plan.stages + 1))
    probe = Probe(lambda: scheduler.round_trips)
    lease.start()
    try:
        if plan.rank == 0:
            return _drive(plan, scheduler, wiring, probe)
        kind = NullFinalStage if plan.rank == plan.stages else NullStage
        StageLoop(kind(plan.rank, plan.hidden_size, probe), plan.rank, wiring).serve(transport)
        return [probe.sample(number, rows) for number, rows in enumerate(plan.rows)]
    finally:
        lease.stop()  # this also leaves the run: stages serve until rank 0 has left
        scheduler.client.close()


def _drive(plan: RankPlan, scheduler: RankScheduler, wiring: Wiring, probe: Probe) -> list[RankSample]:
    """Rank 0: run the requests one after another, then stop the run."""
    client = ClientScheduler(scheduler.client, scheduler.run_id, wiring.topology)
    loop = ScriptedDraftLoop(probe, client, wiring)
    layers = tuple((rank - 1, rank) for rank in range(1, plan.stages + 1))
    scheduler.open(RunDescription(Settings.of(target="null"), wiring.topology.groups, layers))
    samples = []
    # Verdicts: on prefill, on the step that fills the pipeline, those of the warm-up, and one per timed timestep.
    verdicts = 2 + WARM_UP + plan.timesteps
    with loop.serving():
        for number, rows in enumerate(plan.rows):
            before = client.usage().cpu_seconds
            loop.run_scripted(rows, verdicts)
            redis_cpu_ms = 1000 * (client.usage().cpu_seconds - before) / (verdicts + plan.stages)
            samples.append(replace(probe.sample(number, rows), redis_cpu_ms=redis_cpu_ms))
        client.stop()
    return samples


def _intervals_ms(clock: Sequence[float]) -> list[float]:
    return [1000 * (after - before) for before, after in pairwise(clock)]


class Probe:
    """Records clocks and Redis commands of one rank at each sync with a verdict, the prefill's first, by request."""

    def __init__(self, round_trips: Callable[[], int]) -> None:
        self._round_trips = round_trips
        self._requests: list[list[tuple[float, float, int]]] = []

    def begin(self) -> None:
        """A new request begins."""
        self._requests.append([])

    def note(self) -> None:
        """Called at each sync."""
        self._requests[-1].append((time.perf_counter(), time.process_time(), self._round_trips()))

    def sample(self, number: int, rows: int) -> RankSample:
        """The steady state of a request: from ``WARM_UP`` timesteps after the pipeline was full."""
        wall, cpu, trips = zip(*self._requests[number][1 + WARM_UP :], strict=True)
        timesteps = len(wall) - 1
        cpu_ms = 1000 * (cpu[-1] - cpu[0]) / timesteps
        return RankSample("pipedec", rows, _intervals_ms(wall), (trips[-1] - trips[0]) / timesteps, cpu_ms)


class _NoLayers:
    """Stands in for a ``StageModel`` (see ``no_layers``)."""

    config = SimpleNamespace(vocab_size=1)

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._zeros: dict[int, Tensor] = {}  # by number of rows

    def make_pool(self, slots: int, block: int) -> KVPool:
        return _EmptyPool((), torch.float32, slots, block)

    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        for lane in lanes:
            lane.append()
        rows = len(inputs)
        if rows not in self._zeros:
            self._zeros[rows] = torch.zeros(rows, self._hidden_size)
        return self._zeros[rows]


def no_layers(hidden_size: int = 1) -> StageModel:
    """A model of no layers, whose activations are zeros, [R, ``hidden_size``]."""
    return cast(StageModel, _NoLayers(hidden_size))


class _EmptyPool(KVPool):
    """Any number of slots that hold nothing."""

    def copy(self, sources: Sequence[int], targets: Iterable[range]) -> None:
        """There is nothing to copy."""


def sequence_of(opening: NewRequest, max_tokens: int = sys.maxsize) -> NewSequence:
    """Makes sequences that begin with the output of ``opening`` and end after ``max_tokens`` tokens."""

    def new_sequence() -> ThreadSequence:
        sequence = ThreadSequence(opening.prompt_length, (), max_tokens)
        replay(sequence, opening.output_token_ids)
        return sequence

    return new_sequence


class _NullLane(FinalLane):
    """A lane without trees: it keeps count of rows, and prunes none. It accepts a token per timestep until ``max_tokens``."""

    def __init__(self, opening: NewRequest, cache: KVCache) -> None:
        self.cache = cache
        self.forest = Forest(ThreadSequence(opening.prompt_length, (), opening.sampling.max_tokens))
        self._left = opening.sampling.max_tokens

    def enter(self, step: Step) -> LaneRows:
        return LaneRows(step.token_ids, self.cache)

    def sync(self, verdict: Verdict) -> None:
        """Nothing is pruned."""

    def result(self, number: int, token_ids: list[int]) -> RequestUpdate:
        self._left -= 1
        self.has_ended = self._left == 0
        return RequestUpdate(number, verdict=Verdict.of(_TOKEN, finished="length" if self.has_ended else None))


class NullStage(StageWorker):
    """A stage without layers and trees; activations are zeros [R, E]."""

    def __init__(self, stage: int, hidden_size: int, probe: Probe) -> None:
        super().__init__(no_layers(hidden_size), sequence_of, slots=_SLOTS, stage=stage)
        self._probe = probe

    def replay(self, updates: Iterable[RequestUpdate], waiting: StageMessage = EMPTY) -> StageMessage:
        waiting = super().replay(updates, waiting)
        for update in updates:
            if update.opening is not None:
                self._probe.begin()
            if update.verdict is not None:
                self._probe.note()
        return waiting

    def _new_lane(self, number: int, opening: NewRequest, cache: KVCache) -> FinalLane:
        return _NullLane(opening, cache)


class NullFinalStage(NullStage, FinalStageWorker):
    """The last stage."""

    def _judge(self, activations: Mapping[int, Tensor], is_finite: bool) -> dict[int, list[int]]:
        """Every lane knows its tokens."""
        return {number: [] for number in activations}


class ScriptedBatch:
    """One request at a time: the prompt's only token enters, then ``rows`` rows at every timestep; verdicts change nothing."""

    def __init__(self, probe: Probe, passage: int) -> None:
        self.rows, self.passage = 1, passage
        self.requests: dict[int, SimpleNamespace] = {}
        self.only = None
        self.faults = RequestFaults("rank 0")
        self._probe = probe
        self._updates: Iterator[RequestUpdate] = iter(())

    def open(self, request: TokenizedRequest, new_sequence: NewSequence) -> None:
        self._probe.begin()
        opening = NewRequest(len(request.prompt_token_ids), request.sampling, slots=((0, _SLOTS),))
        self.requests[request.number] = SimpleNamespace(hits=0, misses=0)  # which a pool reads at its end
        following = RequestUpdate(request.number, step=_step(self.rows))
        self._updates = chain([RequestUpdate(request.number, opening, step=_step(1))], repeat(following))

    def to_pause(self) -> list[int]:
        return []

    def apply(self, number: int, verdict: Verdict) -> None:
        self._probe.note()
        if verdict.finished is not None:
            self.close(number)

    def close(self, number: int) -> None:
        del self.requests[number]

    def propose(self) -> dict[int, RequestUpdate]:
        return {number: next(self._updates) for number in self.requests}

    def draft(self) -> None:
        """There is no draft."""

    def observe(self, timing: TimestepTiming) -> None:
        """Timestep timing is not used."""


def _step(num_rows: int) -> Step:
    return Step(torch.full((num_rows,), _TOKEN), torch.full((num_rows,), -1))


class OneWordPrompter:
    """A detokenizer in which every token is the same word."""

    def stream(self) -> OneWordPrompter:
        return self

    def add(self, tokens: Sequence[int]) -> str:
        return " word" * len(tokens)

    text = add

    def finish(self) -> str:
        return ""


class ScriptedDraftLoop(DraftLoop):
    """Rank 0 without a draft model and a tokenizer, which submits its requests itself."""

    def __init__(self, probe: Probe, client: ClientScheduler, wiring: Wiring) -> None:
        admission = cast(Admission, SimpleNamespace(admit=self._answer))
        super().__init__(wiring, admission, Batch)
        self._client = client
        self._script = ScriptedBatch(probe, wiring.topology.num_groups)
        self._batch = self._pool.batch = cast(Batch, self._script)
        self._max_tokens = 1

    def serving(self) -> AbstractContextManager[None]:
        """The context in which ``run_scripted`` may be called."""
        return self._queue.serving()

    def run_scripted(self, num_rows: int, max_tokens: int) -> None:
        """Run one request of ``max_tokens`` verdicts. Raises PipedecError if the run was aborted, or a rank or Redis was lost."""
        self._script.rows, self._max_tokens = num_rows, max_tokens
        self._client.submit("scripted")
        message = self._queue.wait(_QUEUE_SECONDS)
        if message is None or message.kind != "request":
            raise SchedulerLost("the request that was submitted has not arrived")
        self._admit(message)
        self._decode()

    def _answer(self, message: RankMessage, batch: Batch) -> tuple[RunningAnswer, NewSequence]:
        request = TokenizedRequest(message.number, (_TOKEN,), SamplingParams(max_tokens=self._max_tokens), "scripted")
        new_sequence = partial(ThreadSequence, 1, (), self._max_tokens)
        prompter = cast(Prompter, OneWordPrompter())
        return RunningAnswer(request, new_sequence, prompter, self._wiring.topology.num_stages), new_sequence
