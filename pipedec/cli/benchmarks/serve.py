"""``pipedec bench serve``: the HTTP server beside the Python client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from pipedec.cli.benchmarks.shared import OUT_HELP, PATH, append
from pipedec.cli.show import console


@click.command()
@click.option("--preset", default="paper-14", show_default=True, help="The partition that is emulated.")
@click.option("--stages", type=click.IntRange(1), help="Stages instead of the partition's.")
@click.option("--cluster", type=PATH, help="A cluster.yaml whose partitions are the presets (default: the paper's).")
@click.option("--target", type=PATH, help="Target checkpoint directory (default: the shipped pair).")
@click.option("--draft", help="Draft checkpoint directory, or none.")
@click.option("--streams", type=int, default=64, show_default=True, help="Answers at the same time.")
@click.option("--tokens", type=int, default=64, show_default=True, help="Tokens of an answer.")
@click.option("--repeats", type=int, default=5, show_default=True, help="Times that one stream and the client take turns.")
@click.option("--connections", type=int, default=500, show_default=True, help="Idle connections.")
@click.option("--drops", type=int, default=1000, show_default=True, help="Connections that are closed at a random moment.")
@click.option("--waiting", type=int, default=100, show_default=True, help="Requests that wait.")
@click.option("--out", type=PATH, help=OUT_HELP)
def serve(
    preset: str, stages: int | None, cluster: Path | None, target: Path | None, draft: str | None, out: Path | None, **sizes: int
) -> None:
    """Measure what `pipedec serve` costs: its streams beside the Python client, on one emulated cluster in one run.

    Server, ranks, Redis and sockets are real processes; the stages sleep as long as the emulated devices compute.
    """
    from pipedec.bench.record import check_writable
    from pipedec.bench.serve.benchmark import ServeConfig, measure_serve
    from pipedec.bench.sweep.pipelines import Pair, emulated
    from pipedec.config import load_cluster, paper_cluster

    check_writable(out)
    config = ServeConfig(**sizes)
    shape = emulated(load_cluster(cluster) if cluster else paper_cluster(), preset, stages, Pair(target, draft))
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
