"""One rank of the overhead measurement: the real rank loop with a stage that computes nothing, then the bare messages.

Measures its own rank; ``benchmark`` combines the ranks. The critical path of a timestep, the sequential reports to Redis that it
waited for, is read from the scheduler's trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch

from pipedec.bench.overhead.null_stage import NullFinalStage, NullStage, Probe, ScriptedDraftLoop
from pipedec.cluster.lease import LeaseKeeper
from pipedec.cluster.place import RankPlace
from pipedec.config import Settings
from pipedec.directories import reference_pair
from pipedec.engine.admission import Sequences
from pipedec.engine.rank_tasks import Wiring
from pipedec.engine.stage_loop import StageLoop
from pipedec.messages import RunDescription
from pipedec.plan.spec import DISPATCHES
from pipedec.scheduler import ClientScheduler, GrantedTask, RankScheduler, Task, connect
from pipedec.topology import Topology
from pipedec.tracing import Tracer
from pipedec.transport.rendezvous import Rendezvous, file_store
from pipedec.transport.torch_distributed import TorchTransport, bare_timesteps

WARM_UP = 5
TRACED_TIMESTEPS = 20
PEER_SECONDS = 60.0


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
        critical_path: successive reports to Redis in each traced timestep; rank 0 only.
    """

    kind: str
    rows: int
    timesteps_ms: list[float]
    round_trips: float = 0.0
    cpu_ms: float = 0.0
    redis_cpu_ms: float = 0.0
    critical_path: list[int] = field(default_factory=list)


def measure_rank(plan: RankPlan, report: Callable[[RankSample], None]) -> None:
    """Alternate between the pipeline and the bare messages, ``repeats`` times; report a sample of each for every number of rows.

    Raises PipedecError if a peer or Redis was lost.
    """
    torch.set_num_threads(1)
    rendezvous = Rendezvous(plan.rank, plan.stages + 1, file_store(plan.meeting, plan.stages + 1), PEER_SECONDS, "lo")
    transport = TorchTransport("gloo", plan.rank, plan.hidden_size, torch.float32, torch.device("cpu"))
    transport.join(rendezvous)
    try:
        for repeat in range(plan.repeats):
            for sample in _pipeline_samples(plan, f"{plan.run_id}-{repeat}", transport):
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
    """One run: a timed request and a short traced one for each number of rows."""
    topology = Topology.even(plan.stages, plan.stages)
    scheduler = RankScheduler(connect(plan.redis_url), run_id, topology)
    sequences = Sequences(reference_pair() / "target")  # the answers of stages that compute nothing ignore them
    wiring = Wiring(scheduler, transport, topology, Tracer(plan.rank), sequences, window=DISPATCHES[plan.dispatch])
    lease = LeaseKeeper(scheduler, RankPlace(plan.rank, plan.stages + 1, plan.rank, plan.stages + 1))
    lease.start()
    try:
        samples = (_drive if plan.rank == 0 else _follow)(plan, scheduler, wiring)
    finally:
        lease.stop()  # this also leaves the run: stages serve until rank 0 has left
    scheduler.client.close()
    return samples


def _drive(plan: RankPlan, scheduler: RankScheduler, wiring: Wiring) -> list[RankSample]:
    """Rank 0: run the requests one after another, then stop the run."""
    probe = Probe(lambda: scheduler.round_trips)
    client = ClientScheduler(scheduler.client, scheduler.run_id, wiring.topology)
    loop = ScriptedDraftLoop(probe, client, wiring)
    layers = tuple((rank - 1, rank) for rank in range(1, plan.stages + 1))
    scheduler.open(RunDescription(Settings.of(target="null"), wiring.topology.groups, layers))
    samples = []
    with loop.serving():
        for rows in plan.rows:
            before, timesteps = client.usage().cpu_seconds, _verdicts(plan.timesteps) + plan.stages
            loop.run_scripted(rows, _verdicts(plan.timesteps))
            redis_cpu_ms = 1000 * (client.usage().cpu_seconds - before) / timesteps
            timed = _sample(probe, rows)
            granted = loop.run_scripted(rows, _verdicts(TRACED_TIMESTEPS), trace=True)
            lengths = critical_path_lengths(granted)[WARM_UP:]
            samples.append(replace(timed, redis_cpu_ms=redis_cpu_ms, critical_path=lengths))
        client.stop()
    return samples


def _follow(plan: RankPlan, scheduler: RankScheduler, wiring: Wiring) -> list[RankSample]:
    """A stage: serve until the run is stopped. Samples of traced requests are dropped."""
    requests: list[RankSample] = []
    probe = Probe(lambda: scheduler.round_trips)
    kind = NullFinalStage if plan.rank == plan.stages else NullStage

    def on_finished() -> None:
        requests.append(_sample(probe, plan.rows[len(requests) // 2]))

    stage = kind(plan.rank, plan.hidden_size, probe, on_finished)
    StageLoop(stage, plan.rank, wiring).serve(wiring.transport)
    return requests[::2]


def _sample(probe: Probe, rows: int) -> RankSample:
    """The steady state of the last request: from ``WARM_UP`` timesteps after the pipeline was full."""
    first = 1 + WARM_UP
    wall, cpu, trips = probe.wall_seconds[first:], probe.cpu_seconds[first:], probe.round_trips[first:]
    per_timestep = 1 / (len(wall) - 1)
    cpu_ms = 1000 * (cpu[-1] - cpu[0]) * per_timestep
    return RankSample("pipedec", rows, _intervals_ms(wall), (trips[-1] - trips[0]) * per_timestep, cpu_ms)


def _verdicts(timesteps: int) -> int:
    """Verdicts of a request: on prefill, on the step that fills the pipeline, the warm-up, and one per timed timestep."""
    return 2 + WARM_UP + timesteps


def _intervals_ms(clock: list[float]) -> list[float]:
    return [1000 * (after - before) for before, after in pairwise(clock)]


def critical_path(trace: Sequence[GrantedTask], seq: int) -> list[Task]:
    """The chain of tasks between the grant of (C,dec,0,``seq``) and the grant of (C,dec,0,``seq`` + 1), in order.

    A task is granted by the script call that reports the last task it depended on, and Redis's clock does not advance inside a
    script, so the time of a grant identifies its cause. The walk goes backwards from rank 0's next dec: the cause of a task is
    the latest report among (a) the one that granted it and (b) those that its ranks still had to make after that, because a
    rank runs one task at a time. Every task of the chain is one report to Redis that had to precede the next one, so the
    chain's length is the number of round trips on the critical path.

    Raises:
        KeyError: the trace has no dec of rank 0 at ``seq`` or at ``seq`` + 1.
    """
    decodes = {line.task.seq: line for line in trace if line.task.name == "dec" and line.task.target == 0}
    begun, due = decodes[seq].granted_us, decodes[seq + 1].granted_us
    ordered = sorted(trace, key=lambda line: line.finished_us)
    causes = [line for line in ordered if line.finished_us <= due]
    chain: list[Task] = []
    while causes and causes[-1].finished_us > begun:
        cause = causes[-1]
        chain.append(cause.task)
        granting = [line for line in ordered if line.finished_us <= cause.granted_us and line is not cause]
        meanwhile = [line for line in ordered if cause.granted_us < line.finished_us < cause.finished_us]
        own = [line for line in meanwhile if set(line.task.ranks) & set(cause.task.ranks)]
        causes = own or granting
    return chain[::-1]


def critical_path_lengths(trace: Sequence[GrantedTask]) -> list[int]:
    """Round trips on the critical path of every timestep that ends in a verdict of the last rank."""
    synced = {line.task.seq for line in trace if line.task.name == "sync"}
    decoded = {line.task.seq for line in trace if line.task.name == "dec" and line.task.target == 0}
    return [len(critical_path(trace, seq)) for seq in sorted(decoded & synced) if seq + 1 in decoded]
