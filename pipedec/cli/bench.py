"""``pipedec bench``: the fixed cost of a timestep, the resources of a cluster, and a picture of a trace."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.cli.cluster import local_cluster
from pipedec.cli.options import PipelineFlags, pipeline_options
from pipedec.cli.show import console
from pipedec.core import UserError

_MIB = 1024 * 1024
_OUT = click.Path(path_type=Path)
_OUT_HELP = "Append the figures to this JSONL file."


@click.group()
def bench() -> None:
    """Measure. Every figure is written down with the machine, the revision and the whole configuration."""


@bench.command()
@click.option("--stages", default="1,4,8,14", show_default=True, help="Numbers of stages, with commas between them.")
@click.option("--rows", default="1,32", show_default=True, help="Rows of every step, with commas between them.")
@click.option("--timesteps", type=int, default=200, show_default=True, help="Timed timesteps per repeat.")
@click.option("--hidden", type=int, default=192, show_default=True, help="Hidden size: it sets the bytes of a step.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Turns that pipeline and bare transport take.")
@click.option("--out", type=_OUT, help=_OUT_HELP)
def overhead(stages: str, rows: str, timesteps: int, hidden: int, repeats: int, out: Path | None) -> None:
    """The fixed cost of a timestep: stages that compute nothing, beside the same bytes over bare gloo.

    Ranks, Redis, tasks and transfers are the real ones, one thread per rank, every stage busy at every timestep.
    """
    from pipedec.bench.overhead import OverheadConfig, measure_overhead
    from pipedec.bench.record import append_rows, check_writable

    config = OverheadConfig(_numbers("--stages", stages), _numbers("--rows", rows), timesteps, hidden, repeats)
    check_writable(out)
    measured = []
    with console.status("measuring") as status:
        for row in measure_overhead(config):
            measured.append(row)
            status.update(f"measured {row['stages']} stages, {row['rows']} rows")
    Console().print(_overhead_table(measured))
    _append(out, measured, append_rows)


@bench.command()
@pipeline_options
@click.option("--idle-seconds", type=float, default=5.0, show_default=True, help="How long the idle cluster is watched.")
@click.option(
    "--requests", type=int, default=20, show_default=True, help="Requests in a row, before and after which memory is read."
)
@click.option("--max-tokens", type=int, default=32, show_default=True, help="Tokens of every answer.")
@click.option("--prompt", help="What every request asks.")
@click.option("--out", type=_OUT, help=_OUT_HELP)
def resources(
    pipeline: PipelineFlags, idle_seconds: float, requests: int, max_tokens: int, prompt: str | None, out: Path | None
) -> None:
    """What a resident cluster costs: idle CPU, memory per rank, latency of a request, what requests leave behind."""
    from pipedec.bench.record import append_rows, check_writable
    from pipedec.bench.resources import ResourcesConfig, measure_resources

    chosen = {} if prompt is None else {"prompt": prompt}
    config = ResourcesConfig(idle_seconds, requests, max_tokens, **chosen)
    check_writable(out)
    spec = local_cluster(pipeline).spec
    with console.status("resources") as status:
        row = measure_resources(spec, config, pipeline.transport, on_phase=status.update)
    _print_resources(row)
    _append(out, [row], append_rows)


@bench.command()
@click.argument("trace", type=_OUT)
@click.option("--out", type=_OUT, required=True, help="The picture: a name that ends in .svg, .png or .pdf.")
@click.option("--from-ms", type=float, help="Where the picture begins (default: the first task).")
@click.option("--to-ms", type=float, help="Where it ends (default: the last task).")
@click.option("--title", help="Text above the picture.")
def timeline(trace: Path, out: Path, from_ms: float | None, to_ms: float | None, title: str | None) -> None:
    """Draw TRACE, written by `pipedec generate --trace`: one lane per rank and one for the scheduler."""
    from pipedec.bench.record import check_writable
    from pipedec.bench.timeline import draw_timeline, read_timeline

    check_writable(out)
    drawn = read_timeline(trace).between(from_ms, to_ms)
    draw_timeline(drawn, out, title)
    console.print(f"{len(drawn.bars)} tasks, {drawn.start_ms:.1f} to {drawn.end_ms:.1f} ms, in {out}")


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UserError(f"{flag} {text}: write numbers with commas between them, like 1,4,8") from None


def _append(out: Path | None, rows: Iterable[dict[str, Any]], append_rows: Any) -> None:
    if out is not None:
        append_rows(out, rows)
        console.print(f"Figures appended to {out}")


def _overhead_table(rows: list[dict[str, Any]]) -> Table:
    machine = rows[0]["machine"]
    table = Table(
        title="Fixed cost of a timestep, stages that compute nothing",
        caption=f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}; times in ms: median (90th percentile);\n"
        "serial: Redis calls one after another",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("stages", "rows", "pipedec", "gloo", "ratio", "Redis calls per rank", "by all", "serial", "sends"):
        table.add_column(name, justify="right", min_width=8 if "calls" in name else None, overflow="fold")
    for row in rows:
        trips = row["round_trips_per_rank"]
        table.add_row(
            str(row["stages"]), str(row["rows"]), _spread(row["pipedec_ms"]), _spread(row["raw_ms"]), f"{row['ratio']:.1f}",
            f"{min(trips):.1f}–{max(trips):.1f}", f"{row['round_trips']:.1f}",
            f"{row['critical_path_round_trips']['median']:g}", str(row["messages"]),
        )  # fmt: skip
    return table


def _spread(figures: dict[str, float]) -> str:
    return f"{figures['median']:.2f} ({figures['p90']:.2f})"


def _print_resources(row: dict[str, Any]) -> None:
    output = Console()
    ranks = Table(title="Memory by rank", title_justify="left")
    for name in ("rank", "peak MiB", "own weights MiB", f"growth KiB over {row['config']['requests']} requests", "cache slots"):
        ranks.add_column(name, justify="right")
    for rank in row["ranks"]:
        slots = rank["cache_slots"]
        ranks.add_row(
            str(rank["rank"]),
            "-" if rank["peak_bytes"] is None else f"{rank['peak_bytes'] / _MIB:.0f}",
            f"{rank['weight_bytes'] / _MIB:.1f}",
            f"{rank['rss_growth_bytes'] / 1024:+.0f}",
            "-" if slots["before"] is None else f"{slots['before']} to {slots['after']}",
        )
    output.print(ranks)
    idle, latency, keys = row["idle_cpu_percent"], row["second_request_ms"], row["redis_keys"]
    figures = Table(title="Cluster", title_justify="left", show_header=False)
    figures.add_column(style="dim")
    figures.add_column(justify="right")
    figures.add_row("idle CPU, all ranks and Redis", f"{idle['total']:.1f} % of a core (Redis {idle['redis']:.1f} %)")
    figures.add_row("second request to first token", f"{latency['first_token']:.1f} ms (prefill {latency['prefill']:.1f} ms)")
    figures.add_row("to first decoded token, less prefill", f"{latency['first_decoded_less_prefill']:.1f} ms")
    figures.add_row("Redis keys of the run", f"{keys['before']} to {keys['after']}")
    output.print(figures)
