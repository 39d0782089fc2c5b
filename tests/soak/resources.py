"""``python -m soak.resources``: idle CPU, memory and TTFT of a resident cluster, and what requests leave in memory and Redis."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import click
import psutil
from msgspec import Meta
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from support.checkpoints import stage_parameters
from support.redis_usage import usage

from benchmarks.output import pipeline_row
from pipedec.bench.record import Row, append_rows, check_writable, header
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.config import Settings, settings_options
from pipedec.core.errors import PipedecError, RankLost
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.engine.build import DTYPES, resolve, weights_on
from pipedec.engine.devices import chosen_device
from pipedec.families import model_by_name
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.messages.request import PromptRequest
from pipedec.plan.spec import PipelineSpec, run_description
from pipedec.scheduler import ClientScheduler

SETTLE_SECONDS = 1.0
_MIB = 1024 * 1024
_SILENCE_SECONDS = 120.0


@dataclass(frozen=True)
class ResourcesConfig:
    """How long the cluster idles, and the requests that it then answers. Raises UserError if a number is out of range."""

    idle_seconds: Annotated[float, Meta(gt=0), Help("How long idle CPU is measured.", "SECONDS")] = 5.0
    requests: Annotated[int, Meta(ge=1), Help("Number of requests over which memory growth is measured.")] = 20
    max_tokens: Annotated[int, Meta(ge=2), Help("Output tokens per request; the second one is timed.")] = 32
    prompt: Annotated[str, Help("Prompt of every request.", "TEXT")] = "Write a function that returns the sum of a list."

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class TimedAnswer:
    """When the parts of an answer arrived, in seconds after its submission, and the size of the stages' KV caches."""

    token_seconds: list[float] = field(default_factory=list)  # one entry per verdict, starting with the verdict after prefill
    prefill_seconds: float = 0.0  # measured by rank 0
    cache_slots: dict[int, int] = field(default_factory=dict)  # by stage rank; only of a traced request


def measure_resources(spec: PipelineSpec, config: ResourcesConfig, on_phase: Callable[[str], None] = lambda text: None) -> Row:
    """Start a cluster, leave it idle, submit ``requests`` + 3 requests, stop it; returns one JSONL row.

    Raises PipedecError if the cluster could not start, lost a rank, or stopped answering.
    """
    row = header("resources", asdict(config) | {"pipeline": pipeline_row(run_description(spec))})
    cluster = LocalCluster(spec)
    on_phase("starting the cluster")
    with cluster:
        scheduler = cluster.scheduler
        assert scheduler is not None
        client = Client(scheduler, cluster.check, _SILENCE_SECONDS)
        on_phase(f"idle for {config.idle_seconds:g} s")
        row["idle_cpu_percent"] = _idle_cpu(cluster, scheduler, config.idle_seconds)
        asked = PromptRequest(config.prompt, raw=True, sampling=SamplingParams(max_tokens=config.max_tokens, ignore_eos=True))
        on_phase(f"{config.requests} requests")
        first = _ask(client, replace(asked, trace=True))
        second = _ask(client, asked)
        _wait_until_idle(scheduler)
        rss_before, keys_before = _resident_bytes(cluster), usage(scheduler).keys
        for _ in range(config.requests):
            _ask(client, asked)
        _wait_until_idle(scheduler)
        rss_after, keys_after = _resident_bytes(cluster), usage(scheduler).keys
        last = _ask(client, replace(asked, trace=True))
        peaks = {rank: _peak_bytes(pid) for rank, pid in cluster.pids.items()}
    # The first and the last request are traced, since traces contain the cache sizes; memory growth is measured between them.
    row["second_request_ms"] = latencies(second)
    row["redis_keys"] = {"before": keys_before, "after": keys_after}
    weights = _weight_bytes(spec)
    row["ranks"] = [
        {
            "rank": rank, "peak_bytes": peaks[rank], "weight_bytes": weights[rank],
            "rss_growth_bytes": rss_after[rank] - rss_before[rank],
            "cache_slots": {"before": first.cache_slots.get(rank), "after": last.cache_slots.get(rank)},
        }
        for rank in spec.topology.ranks
    ]  # fmt: skip
    return row


def _idle_cpu(cluster: LocalCluster, scheduler: ClientScheduler, seconds: float) -> Row:
    """CPU time of all ranks and of Redis without requests, in percent of one core."""
    time.sleep(SETTLE_SECONDS)
    processes = [psutil.Process(pid) for pid in cluster.pids.values()]
    started, ranks, server = time.perf_counter(), _cpu_seconds(processes), usage(scheduler).cpu_seconds
    time.sleep(seconds)
    cluster.check()
    ranks, server = _cpu_seconds(processes) - ranks, usage(scheduler).cpu_seconds - server
    percent = 100 / (time.perf_counter() - started)
    return {"ranks": ranks * percent, "redis": server * percent, "total": (ranks + server) * percent}


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def _ask(client: Client, request: PromptRequest) -> TimedAnswer:
    """Raises PipedecError if the request was refused, or the cluster lost a rank or stopped answering."""
    arrivals, submitted = list[float](), time.perf_counter()
    reply = client.follow(request, on_text=lambda text: arrivals.append(time.perf_counter() - submitted))
    return TimedAnswer(arrivals, reply.completed().metrics.prefill_seconds, reply.cache_slots)


def latencies(answer: TimedAnswer) -> Row:
    """Milliseconds from submission to the first token (TTFT) and to the first decoded token, the latter also without prefill.

    Raises PipedecError if the answer has a single token.
    """
    if len(answer.token_seconds) < 2:
        raise PipedecError("the answer ended with its first token, so no decoding was timed: use another --prompt")
    first, decoded = answer.token_seconds[:2]
    prefill = answer.prefill_seconds
    figures = {"first_token": first, "first_decoded": decoded, "prefill": prefill}
    figures["first_decoded_less_prefill"] = decoded - prefill
    return {name: 1000 * seconds for name, seconds in figures.items()}


def _wait_until_idle(scheduler: ClientScheduler) -> None:
    """A client has its answer shortly before the session ends: only then are memory and keys what the requests leave."""
    deadline = time.monotonic() + _SILENCE_SECONDS
    while scheduler.status().running or usage(scheduler).is_working:
        if time.monotonic() > deadline:
            raise RankLost(f"the ranks are still busy {_SILENCE_SECONDS:.0f} s after the last answer: see pipedec status")
        time.sleep(0.01)


def _resident_bytes(cluster: LocalCluster) -> dict[int, int]:
    return {rank: psutil.Process(pid).memory_info().rss for rank, pid in cluster.pids.items()}


def _peak_bytes(pid: int) -> int | None:
    """Peak resident memory of a process, shared libraries included; None on systems other than Linux."""
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8")) if status.is_file() else None
    return 1024 * int(found[1]) if found else None


def _weight_bytes(spec: PipelineSpec) -> dict[int, int]:
    """Bytes of each rank's own weights."""
    draft_weights, _ = weights_on(spec, 0, chosen_device(spec.settings.cut.device))
    size, draft_size = DTYPES[spec.dtype].itemsize, DTYPES[draft_weights.dtype].itemsize
    weights = {rank: size * stage_parameters(spec.target, range(*layers)) for rank, layers in enumerate(spec.layers, start=1)}
    return {0: 0 if spec.draft is None else draft_size * model_by_name(str(spec.draft)).parameters, **weights}


@click.command()
@settings_options
@options_of(ResourcesConfig, "config")
@own_options
def resources(
    settings: Settings,
    config: ResourcesConfig,
    out: Annotated[Path | None, Help("Append the results to this JSONL file.", "FILE")] = None,
) -> None:
    """Measure a resident cluster: idle CPU, memory per rank, latency of a request, memory and Redis keys left by requests."""
    check_writable(out)
    row = measure_resources(resolve(settings), config, on_phase=partial(click.echo, err=True))
    _print_resources(row)
    if out is not None:
        append_rows(out, [row])


def _print_resources(row: Row) -> None:
    output = Console()
    ranks = Table(title="Memory by rank", title_justify="left")
    for name in ("rank", "peak MiB", "own weights MiB", f"growth KiB over {row['config']['requests']} requests", "cache slots"):
        ranks.add_column(name, justify="right")
    for rank in row["ranks"]:
        slots = rank["cache_slots"]
        ranks.add_row(
            str(rank["rank"]), "-" if rank["peak_bytes"] is None else f"{rank['peak_bytes'] / _MIB:.0f}",
            f"{rank['weight_bytes'] / _MIB:.1f}", f"{rank['rss_growth_bytes'] / 1024:+.0f}",
            "-" if slots["before"] is None else f"{slots['before']} to {slots['after']}",
        )  # fmt: skip
    output.print(ranks)
    idle, latency, keys = row["idle_cpu_percent"], row["second_request_ms"], row["redis_keys"]
    figures = Table(title="Cluster", title_justify="left", show_header=False)
    figures.add_row("idle CPU, all ranks and Redis", f"{idle['total']:.1f} % of a core (Redis {idle['redis']:.1f} %)")
    figures.add_row("TTFT of the second request", f"{latency['first_token']:.1f} ms (prefill {latency['prefill']:.1f} ms)")
    figures.add_row("time to the second token, without prefill", f"{latency['first_decoded_less_prefill']:.1f} ms")
    figures.add_row("Redis keys of the run", f"{keys['before']} to {keys['after']}")
    output.print(figures)


if __name__ == "__main__":
    run_command(resources)
