"""``python -m benchmarks.overhead``: what a timestep of a running cluster costs beside the forwards of its slowest stages."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated

import click
from rich.table import Table

from benchmarks.output import Out, append
from pipedec.bench.breakdown import PHASES, breakdown
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import Row, check_writable, header, plain
from pipedec.bench.report.style import terminal_table
from pipedec.cli.benchmarks.shared import print_table
from pipedec.cli.options import RunningFlags, running_options
from pipedec.cli.show import console
from pipedec.client.run_handle import RunHandle
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.messages.request import PromptRequest
from pipedec.topology import Topology
from pipedec.tracing import TraceEvent

PROMPT = "Count from one to one hundred in words."


@dataclass(frozen=True)
class OverheadConfig:
    """The grid: ``repeats`` traced answers of at least ``timesteps`` timesteps for each number of rows.

    1 row per timestep is ``pp``, more are ``pipedec`` with this width, which needs a draft model. Raises UserError for a number
    below 1, or no number.
    """

    rows: Annotated[Counts, Help("Rows per timestep.")] = (1, 32)
    timesteps: Annotated[Positive, Help("Timesteps of an answer.")] = 200
    repeats: Annotated[Positive, Help("Answers.")] = 3

    def __post_init__(self) -> None:
        check_fields(self)


def measure(config: OverheadConfig, cluster: RunHandle, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
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


def _measure_answers(config: OverheadConfig, cluster: RunHandle, num_rows: int) -> Row:
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


def slowest_compute_ms(events: Iterable[TraceEvent], topology: Topology) -> float | None:
    """The forwards of the slowest group in a timestep, in ms: mean over the timesteps of one traced answer; None if it has none.

    The stages of a group compute one after another, the groups at the same time.
    """
    spent: dict[int, list[int]] = defaultdict(lambda: [0] * topology.num_groups)
    for event in events:
        timestep = re.search(r"F(\d+)$", event.label)  # 0 in prefill
        if event.rank > 0 and timestep is not None and int(timestep[1]) > 0:
            spent[int(timestep[1])][topology.group_of(event.rank)] += event.end_us - event.start_us
    return statistics.fmean(map(max, spent.values())) / 1000 if spent else None


@click.command()
@options_of(OverheadConfig, "config")
@running_options
@own_options
def overhead(config: OverheadConfig, place: RunningFlags, out: Out = None) -> None:
    """Measure what a timestep of the running cluster costs, by traced answers: a timestep, the forwards of its slowest group of
    stages, and what is left. 1 row is pp, more are pipedec of this width.

    What is left is an upper bound of the fixed cost, as it holds waiting for the draft.
    """
    check_writable(out)
    cluster = place.connect()
    if cluster.description.draft is None and max(config.rows) > 1:
        console.print(f"Run {cluster.run_id} has no draft model: 1 row is measured alone.")
    with console.status("measuring") as status:
        measured = measure(config, cluster, lambda row: status.update(f"measured {row['rows']} rows"))
    print_table(_table(measured), 110)
    append(out, measured)


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    devices = ", ".join(dict.fromkeys(f"{rank['device']} of {rank['host']}" for rank in first["ranks"]))
    table = terminal_table(
        f"A timestep of run {first['run']}: {first['stages']} stages in {first['groups']} groups, {first['dispatch']}",
        ("rows", "method", "timesteps", "timestep", "slowest group", "left", *first["breakdown_ms"]),
        ("method",),
        f"{devices}; {first['dtype']}; times in ms: means over timesteps, of these the median of the answers.\n"
        "Left: the timestep without the forwards of its slowest group. Its parts, and compute, are means over the stages.",
    )
    for row in rows:
        times = [row["timestep_ms"], row["slowest_compute_ms"], row["left_ms"], *row["breakdown_ms"].values()]
        table.add_row(str(row["rows"]), row["method"], str(row["timesteps"]), *(f"{time_ms:.2f}" for time_ms in times))
    return table


if __name__ == "__main__":
    run_command(overhead)
