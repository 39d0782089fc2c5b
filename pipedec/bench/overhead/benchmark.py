"""The fixed cost of a timestep, with stages that compute nothing or on a running cluster.

``measure_overhead`` starts real processes, a real Redis and real transfers; the same processes alternate with sending the same
bytes over the bare process group. ``null_rank`` measures one rank, this combines their samples. ``measure_running`` traces
answers of a cluster that runs a real model.
"""

from __future__ import annotations

import math
import secrets
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from pipedec.bench.breakdown import PHASES, breakdown, slowest_compute_ms
from pipedec.bench.options import Counts, Positive
from pipedec.bench.overhead.null_rank import RankPlan, measure_rank
from pipedec.bench.record import Row, header, plain, spread
from pipedec.client.running import Running
from pipedec.cluster.processes import RankProcesses, describe_exit
from pipedec.core.errors import PipedecError, RankLost, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.flags import Help, check_fields
from pipedec.messages.request import PromptRequest
from pipedec.scheduler import EmbeddedServer
from pipedec.transport.wire import message_bytes

PROMPT = "Count from one to one hundred in words."
_START_SECONDS = 120.0
_TIMESTEP_SECONDS = 0.5

RankBody = Callable[[Any, Callable[[Any], None]], None]  # called with the rank's plan and a function for its reports


@dataclass(frozen=True)
class RunningOverheadConfig:
    """The grid on a running cluster: ``repeats`` traced answers of at least ``timesteps`` timesteps per number of rows.

    1 row per timestep is ``pp``, more are ``pipedec`` with this width, which needs a draft model. Raises UserError for a number
    below 1, or no number.
    """

    rows: Annotated[Counts, Help("Rows per timestep.")] = (1, 32)
    timesteps: Annotated[Positive, Help("Timed timesteps per repeat.")] = 200
    repeats: Annotated[Positive, Help("Times that pipeline and bare gloo take turns; or answers of a running cluster.")] = 3

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class OverheadConfig(RunningOverheadConfig):
    """The grid: every number of ``stages`` × dispatch × number of ``rows``, ``repeats`` × ``timesteps`` each.

    Raises UserError for an unknown dispatch, a number below 1, or no number.
    """

    stages: Annotated[Counts, Help("Numbers of stages.")] = (1, 2, 4, 7, 8, 14, 21)
    hidden_size: Annotated[Positive, Help("Hidden size; determines the bytes of a step.", flag="--hidden")] = 192
    dispatches: Annotated[
        tuple[Literal["windows", "tasks"], ...], Help("Work that Redis grants: windows, tasks, or both.", flag="--dispatch")
    ] = ("windows", "tasks")  # fmt: skip


def measure_overhead(config: OverheadConfig, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """One JSONL row per number of stages, dispatch and number of rows; ``on_row`` gets each as soon as it is measured.

    Times are rank 0's, from one of its syncs to the next, with all stages busy. ``mean_ms`` is the median of the repeats' means,
    and ``ratio`` compares these: without a barrier several results may arrive at once, so single timesteps mean little.
    Round trips per rank are Redis commands counted by each rank's scheduler, lease renewals (one per second) included.

    Raises RankLost if a rank died or stopped reporting; all processes have ended then.
    """
    first = header("overhead", asdict(config))
    rows = []
    with EmbeddedServer() as server:
        for stages, dispatch in product(config.stages, config.dispatches):
            for figures in _measure_stages(config, stages, dispatch, server):
                rows.append({**first, **figures})
                on_row(rows[-1])
    return rows


def _measure_stages(config: OverheadConfig, stages: int, dispatch: str, server: EmbeddedServer) -> Iterator[Row]:
    verdicts = config.timesteps * len(config.rows) * 2  # each rank reports once per repeat
    with tempfile.TemporaryDirectory(prefix="pipedec-bench-", ignore_cleanup_errors=True) as directory:
        plan = RankPlan(
            rank=0, stages=stages, rows=config.rows, timesteps=config.timesteps, hidden_size=config.hidden_size,
            repeats=config.repeats, dispatch=dispatch, redis_url=server.url, run_id=f"overhead-{secrets.token_hex(4)}",
            meeting=Path(directory) / "rendezvous",
        )  # fmt: skip
        plans = [replace(plan, rank=rank) for rank in range(stages + 1)]
        reports = run_ranks(measure_rank, plans, _START_SECONDS + verdicts * _TIMESTEP_SECONDS)
    for num_rows in config.rows:
        own, raw = (  # the samples of each rank: of the pipeline, and of the bare messages
            [[sample for sample in samples if (sample.kind, sample.rows) == (kind, num_rows)] for samples in reports]
            for kind in ("pipedec", "raw")
        )
        first = {"pipedec": own[0], "raw": raw[0]}
        times = {kind: [time_ms for sample in samples for time_ms in sample.timesteps_ms] for kind, samples in first.items()}
        means = {kind: [round(statistics.fmean(one.timesteps_ms), 4) for one in samples] for kind, samples in first.items()}
        mean_ms = {kind: statistics.median(values) for kind, values in means.items()}
        trips = [statistics.mean(sample.round_trips for sample in samples) for samples in own]
        yield {
            "dispatch": dispatch,
            "stages": stages,
            "rows": num_rows,
            "timesteps": len(times["pipedec"]),
            "pipedec_ms": spread(times["pipedec"]),
            "raw_ms": spread(times["raw"]),
            "mean_ms": mean_ms,
            "ratio": mean_ms["pipedec"] / mean_ms["raw"],
            "repeat_means_ms": means,
            "round_trips_per_rank": [round(trip, 2) for trip in trips],
            "round_trips": round(sum(trips), 2),
            "cpu_ms": {
                "ranks": sum(statistics.mean(sample.cpu_ms for sample in samples) for samples in own),
                "redis": statistics.mean(sample.redis_cpu_ms for sample in own[0]),
                "raw": sum(statistics.mean(sample.cpu_ms for sample in samples) for samples in raw),
            },
            "messages": stages,
            "message_bytes": message_bytes(num_rows, config.hidden_size, torch.float32),
        }


def run_ranks(body: RankBody, plans: Sequence[Any], silence_seconds: float) -> list[list[Any]]:
    """Run ``body(plans[rank], report)`` in a process per rank; everything each rank reported, by rank, once all have ended.

    ``body``, the plans and the reports must be picklable. All processes have ended when it returns or raises. Raises RankLost if
    a rank died, or none reports for ``silence_seconds``; PipedecError, with the rank's own message, if a rank failed.
    """
    reports: list[list[Any]] = [[] for _ in plans]
    processes = RankProcesses()
    try:
        for rank, plan in enumerate(plans):
            processes.start(rank, _run_rank, body, plan)
        while processes.reporting:
            arrived = processes.read(silence_seconds)
            if not arrived:
                silent = ", ".join(map(str, processes.reporting))
                raise RankLost(f"ranks {silent} have reported nothing for {silence_seconds:.0f} s")
            for rank, report in arrived:
                match report:
                    case None if (status := processes.exit_status(rank)) != 0:
                        raise RankLost(f"rank {rank} {'does not end' if status is None else describe_exit(status)}")
                    case "error", message:
                        raise PipedecError(message)
                    case "report", content:
                        reports[rank].append(content)
    finally:
        processes.kill()
    return reports


def _run_rank(body: RankBody, plan: Any, report: Callable[[Any], None]) -> int:
    """The process of a rank. Returns its exit status."""
    try:
        body(plan, lambda content: report(("report", content)))
        return 0
    except PipedecError as error:
        report(("error", str(error)))
    except Exception as error:
        report(("error", f"internal error: {type(error).__name__}: {error}"))
    return 1


def measure_running(
    config: RunningOverheadConfig, cluster: Running, on_row: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """One JSONL row per number of rows; more than one row needs a draft model and is left out without one.

    Times are means over the timesteps of an answer, of which the median over the repeats is taken. ``left_ms`` is a timestep
    without the forwards of its slowest group of stages: waiting for the draft or for rows, transfers, verdicts and the scheduler.
    On a GPU a forward counts until its kernels are launched, so ``left_ms`` contains a part of it. ``breakdown_ms`` has the
    phases of ``breakdown``, means over stages.

    Raises UserError if the cluster refuses the request, or has no draft model and 1 is not among the rows; RankLost or
    SchedulerLost if it died.
    """
    first, rows = header("overhead", asdict(config)), []
    possible = [num_rows for num_rows in config.rows if num_rows == 1 or cluster.description.draft is not None]
    if not possible:
        raise UserError(f"run {cluster.run_id} has no draft model, so there is nothing but 1 row per timestep: give --rows 1")
    for num_rows in possible:
        rows.append({**first, **_measure_answers(config, cluster, num_rows)})
        on_row(rows[-1])
    return rows


def _measure_answers(config: RunningOverheadConfig, cluster: Running, num_rows: int) -> Row:
    method = "pp" if num_rows == 1 else "pipedec"
    # pp takes as many timesteps per token as there are groups; the first token is the prefill's.
    max_tokens = 1 + math.ceil(config.timesteps / cluster.topology.num_groups)
    options = {} if num_rows == 1 else {"width": num_rows}
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = PromptRequest(PROMPT, method=method, sampling=sampling, options=options, trace=True)
    cluster.client.ask(request)  # warms up
    answers: list[dict[str, float]] = []  # of each traced answer its number of timesteps, and means in ms
    for _ in range(config.repeats):
        reply = cluster.client.follow(request)
        metrics = reply.completed().metrics
        slowest = slowest_compute_ms(reply.trace, cluster.topology)
        phases = breakdown(reply.trace, cluster.topology.num_stages)
        assert slowest is not None and phases is not None, "the answer was traced"
        timestep_ms = 1000 * metrics.decode_seconds / metrics.timesteps
        times = {"timestep_ms": timestep_ms, "slowest_compute_ms": slowest, "left_ms": timestep_ms - slowest}
        answers.append({"timesteps": metrics.timesteps, **times, **phases})
    medians = {name: round(statistics.median(answer[name] for answer in answers), 4) for name in answers[0]}
    described = cluster.description
    return {
        "run": cluster.run_id,
        "stages": cluster.topology.num_stages,
        "groups": cluster.topology.num_groups,
        "dispatch": described.settings.cluster.dispatch,
        "dtype": described.settings.numbers.dtype,
        "ranks": [plain(rank) for rank in described.ranks],
        "target": described.target,
        "method": method,
        "rows": num_rows,
        "timesteps": sum(answer["timesteps"] for answer in answers),
        "repeat_ms": [answer["timestep_ms"] for answer in answers],
        **{name: medians[name] for name in ("timestep_ms", "slowest_compute_ms", "left_ms")},
        "breakdown_ms": {name: medians[name] for name in PHASES},
    }
