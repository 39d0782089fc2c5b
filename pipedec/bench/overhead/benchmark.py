"""The fixed cost of a timestep: real processes, a real Redis, real transfers, and stages that compute nothing.

For comparison the same processes alternate with sending the same bytes over the bare process group. Combines the samples of all
ranks; ``null_rank`` measures one rank.
"""

from __future__ import annotations

import secrets
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from pipedec.bench.options import Counts, Positive
from pipedec.bench.overhead.null_rank import TRACED_TIMESTEPS, RankPlan, RankSample, measure_rank
from pipedec.bench.overhead.ranks import run_ranks
from pipedec.bench.overhead.running import RunningOverheadConfig
from pipedec.bench.record import Row, header, spread
from pipedec.flags import Help
from pipedec.scheduler import EmbeddedServer
from pipedec.transport.wire import message_bytes

_START_SECONDS = 120.0
_TIMESTEP_SECONDS = 0.5


@dataclass(frozen=True)
class OverheadConfig(RunningOverheadConfig):
    """What is measured: every number of ``stages`` × dispatch × number of ``rows``, ``repeats`` × ``timesteps`` each.

    Raises:
        UserError: an unknown dispatch, a number below 1, or no number.
    """

    stages: Annotated[Counts, Help("Numbers of stages.")] = (1, 2, 4, 7, 8, 14, 21)
    hidden_size: Annotated[Positive, Help("Hidden size; determines the bytes of a step.", flag="--hidden")] = 192
    dispatches: Annotated[
        tuple[Literal["windows", "tasks"], ...], Help("What Redis grants: windows, tasks, or both.", flag="--dispatch")
    ] = ("windows", "tasks")

    @property
    def silence_seconds(self) -> float:
        """Without any report for this long the measurement hangs; each rank reports once per repeat."""
        verdicts = (self.timesteps + TRACED_TIMESTEPS) * len(self.rows) * 2
        return _START_SECONDS + verdicts * _TIMESTEP_SECONDS


def measure_overhead(config: OverheadConfig, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """One JSONL row per number of stages, dispatch and number of rows; ``on_row`` gets each as soon as it is measured.

    Times are rank 0's, from one of its syncs to the next, with all stages busy. ``mean_ms`` is the median of the repeats' means,
    and ``ratio`` compares these: without a barrier several results may arrive at once, so single timesteps mean little.
    Round trips per rank are Redis commands counted by each rank's scheduler, lease renewals (one per second) included.
    ``critical_path_round_trips`` is counted in a separate short traced request: see ``critical_path``.

    Raises:
        RankLost: a rank died or stopped reporting; all processes have ended.
    """
    first = header("overhead", asdict(config))
    rows = []
    with EmbeddedServer() as server:
        for stages in config.stages:
            for dispatch in config.dispatches:
                for figures in _measure_stages(config, stages, dispatch, server):
                    rows.append({**first, **figures})
                    on_row(rows[-1])
    return rows


def _measure_stages(config: OverheadConfig, stages: int, dispatch: str, server: EmbeddedServer) -> Iterator[Row]:
    directory = tempfile.mkdtemp(prefix="pipedec-bench-")
    run_id = f"overhead-{secrets.token_hex(4)}"
    plan = RankPlan(
        rank=0, stages=stages, rows=config.rows, timesteps=config.timesteps, hidden_size=config.hidden_size,
        repeats=config.repeats, dispatch=dispatch, redis_url=server.url, run_id=run_id, meeting=Path(directory) / "rendezvous",
    )  # fmt: skip
    plans = [replace(plan, rank=rank) for rank in range(stages + 1)]
    try:
        reports: list[list[RankSample]] = run_ranks(measure_rank, plans, config.silence_seconds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for num_rows in config.rows:
        yield {"dispatch": dispatch, **_figures(config, stages, num_rows, reports)}


def _figures(config: OverheadConfig, stages: int, num_rows: int, reports: list[list[RankSample]]) -> Row:
    """The figures of all ranks' samples with ``num_rows`` rows."""
    ranks = [[sample for sample in samples if sample.rows == num_rows] for samples in reports]
    own = [[sample for sample in samples if sample.kind == "pipedec"] for samples in ranks]
    raw = [[sample for sample in samples if sample.kind == "raw"] for samples in ranks]
    pipedec_ms, raw_ms = _times(own[0]), _times(raw[0])
    pipedec_means, raw_means = _means(own[0]), _means(raw[0])
    trips = [statistics.mean(sample.round_trips for sample in samples) for samples in own]
    lengths = [length for sample in own[0] for length in sample.critical_path]
    return {
        "stages": stages,
        "rows": num_rows,
        "timesteps": len(pipedec_ms),
        "pipedec_ms": spread(pipedec_ms),
        "raw_ms": spread(raw_ms),
        "mean_ms": {"pipedec": statistics.median(pipedec_means), "raw": statistics.median(raw_means)},
        "ratio": statistics.median(pipedec_means) / statistics.median(raw_means),
        "repeat_means_ms": {"pipedec": pipedec_means, "raw": raw_means},
        "round_trips_per_rank": [round(trip, 2) for trip in trips],
        "round_trips": round(sum(trips), 2),
        "critical_path_round_trips": {"median": statistics.median(lengths or [0]), "max": max(lengths, default=0)},
        "messages": stages,
        "message_bytes": message_bytes(num_rows, config.hidden_size, torch.float32),
        "cpu_ms": {
            "ranks": sum(statistics.mean(sample.cpu_ms for sample in samples) for samples in own),
            "redis": statistics.mean(sample.redis_cpu_ms for sample in own[0]),
            "raw": sum(statistics.mean(sample.cpu_ms for sample in samples) for samples in raw),
        },
    }


def _times(samples: list[RankSample]) -> list[float]:
    return [time_ms for sample in samples for time_ms in sample.timesteps_ms]


def _means(samples: list[RankSample]) -> list[float]:
    """The mean timestep of each repeat."""
    return [round(statistics.fmean(sample.timesteps_ms), 4) for sample in samples]
