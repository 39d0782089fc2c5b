"""``pipedec bench resources``: CPU, memory and request latency of a resident cluster."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.bench.record import check_writable
from pipedec.bench.resources import ResourcesConfig, measure_resources
from pipedec.cli.benchmarks.shared import Out, append
from pipedec.cli.show import console
from pipedec.config import Settings, settings_options
from pipedec.engine.build import resolve
from pipedec.flags import options_of, own_options

_MIB = 1024 * 1024


@click.command()
@settings_options
@options_of(ResourcesConfig, "config")
@own_options
def resources(settings: Settings, config: ResourcesConfig, out: Out = None) -> None:
    """Measure a resident cluster: idle CPU, memory per rank, latency of a request, memory and Redis keys left by requests."""
    check_writable(out)
    spec = resolve(settings)
    with console.status("resources") as status:
        row = measure_resources(spec, config, on_phase=status.update)
    _print_resources(row)
    append(out, [row])


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
    figures.add_row("TTFT of the second request", f"{latency['first_token']:.1f} ms (prefill {latency['prefill']:.1f} ms)")
    figures.add_row("time to the second token, without prefill", f"{latency['first_decoded_less_prefill']:.1f} ms")
    figures.add_row("Redis keys of the run", f"{keys['before']} to {keys['after']}")
    output.print(figures)
