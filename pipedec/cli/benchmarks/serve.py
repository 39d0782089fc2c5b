"""``pipedec bench serve``: the HTTP server beside the Python client."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from pipedec.bench.record import check_writable
from pipedec.bench.serve.benchmark import ServeConfig, measure_serve
from pipedec.cli.benchmarks.shared import EmulatedFlags, Out, append
from pipedec.cli.show import console
from pipedec.flags import options_of, own_options


@click.command()
@options_of(EmulatedFlags, "emulated")
@options_of(ServeConfig, "config")
@own_options
def serve(emulated: EmulatedFlags, config: ServeConfig, out: Out = None) -> None:
    """Measure what `pipedec serve` costs: its streams beside the Python client, on one emulated cluster in one run.

    Server, ranks, Redis and sockets are real processes; the stages sleep as long as the emulated devices compute.
    """
    check_writable(out)
    shape = emulated.shape()
    with console.status("starting the cluster") as status:
        row = measure_serve(config, shape, lambda part: status.update(f"measuring {part}"))
    console.print(_table(row))
    append(out, [row])


def _table(row: dict[str, Any]) -> Table:
    one, many, config = row["one_stream"], row["many_streams"], row["config"]
    table = Table(title=f"pipedec serve, {row['cluster']['stages']} emulated stages", title_justify="left")
    for name in ("figure", "HTTP", "Python client", "ratio"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for title, figures, unit in (
        ("one stream, ms per token", one, "ms_per_token"),
        (f"{config['streams']} streams, tokens/s", many, "tokens_per_second"),
    ):
        table.add_row(title, f"{figures['http_' + unit]:.2f}", f"{figures['python_' + unit]:.2f}", f"{figures['ratio']:.3f}")
    table.add_row("server's CPU per token, ms", f"{many['server_cpu_ms_per_token']:.3f}")
    table.add_row("memory per idle connection, kB", f"{row['idle_connections']['kilobytes']:.1f}")
    table.add_row(f"round trips/s of {config['waiting']} waiting requests", f"{row['round_trips']['per_second']:.1f}")
    same = "the same answer" if row["drops"]["same_answer"] else "ANOTHER ANSWER"
    table.add_row(f"{config['drops']} dropped connections: empty after s", f"{row['drops']['seconds_until_empty']:.2f}", same)
    return table
