"""``pipedec bench overhead``: the fixed cost of a timestep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
from rich.table import Table

from pipedec.bench.overhead.benchmark import OverheadConfig, RunningOverheadConfig, measure_overhead, measure_running
from pipedec.bench.record import Row, append_rows, check_writable
from pipedec.bench.report.style import terminal_table
from pipedec.cli.benchmarks.shared import AS_IT_IS, print_table
from pipedec.cli.options import RunningFlags, refuse_flags, running_options
from pipedec.cli.show import console
from pipedec.flags import Help, options_of, own_options

Out = Annotated[Path | None, Help("Append the results to this JSONL file.", "FILE")]


@click.command()
@options_of(OverheadConfig, "config")
@running_options
@own_options
def overhead(config: OverheadConfig, place: RunningFlags, out: Out = None) -> None:
    """Measure the fixed cost of a timestep: stages that compute nothing, compared with the same bytes over bare gloo.

    Ranks, Redis, tasks and transfers are real; one thread per rank, every stage busy at every timestep.

    With --redis, --run or --running, traced answers of the cluster that is running are measured instead: a timestep, the forwards
    of its slowest group of stages, and what is left. 1 row is pp, more are pipedec of this width. What is left is an upper bound
    of the fixed cost: it holds waiting for the draft, and no bare transport is measured beside it.
    """
    check_writable(out)
    if place.are_given:
        refuse_flags(("stages", "hidden_size", "dispatches"), AS_IT_IS)
        cluster, grid = place.connect(), RunningOverheadConfig(config.rows, config.timesteps, config.repeats)
        if cluster.description.draft is None and max(config.rows) > 1:
            console.print(f"Run {cluster.run_id} has no draft model: 1 row is measured alone.")
        with console.status("measuring") as status:
            measured = measure_running(grid, cluster, lambda row: status.update(f"measured {row['rows']} rows"))
        print_table(_running_table(measured), 110)
    else:
        with console.status("measuring") as status:
            measured = measure_overhead(
                config, lambda row: status.update(f"measured {row['stages']} stages, {row['dispatch']}, {row['rows']} rows")
            )
        print_table(_overhead_table(measured), 100)
    if out is not None:
        append_rows(out, measured)
        console.print(f"Results appended to {out}")


def _running_table(rows: list[Row]) -> Table:
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


def _overhead_table(rows: list[Row]) -> Table:
    machine = rows[0]["machine"]
    table = terminal_table(
        "Fixed cost of a timestep: stages that compute nothing",
        ("stages", "dispatch", "rows", "pipedec", "gloo", "ratio", "Redis calls\nper rank", "by all"),
        ("dispatch",),
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}; times in ms: mean (90th percentile)",
    )
    for row in rows:
        trips = row["round_trips_per_rank"]
        table.add_row(
            str(row["stages"]), row["dispatch"], str(row["rows"]), _times(row, "pipedec"), _times(row, "raw"),
            f"{row['ratio']:.2f}", f"{min(trips):.1f}–{max(trips):.1f}", f"{row['round_trips']:.1f}",
        )  # fmt: skip
    return table


def _times(row: Row, which: str) -> str:
    return f"{row['mean_ms'][which]:.2f} ({row[which + '_ms']['p90']:.1f})"
