"""``pipedec bench timeline``: a figure of a trace."""

from __future__ import annotations

from pathlib import Path

import click

from pipedec.cli.benchmarks.shared import PATH
from pipedec.cli.show import console


@click.command()
@click.argument("trace", type=PATH)
@click.option("--out", type=PATH, required=True, help="The figure: a file name ending in .svg, .png or .pdf.")
@click.option("--from-ms", type=float, help="Start of the figure (default: the first task).")
@click.option("--to-ms", type=float, help="End of the figure (default: the last task).")
@click.option("--title", help="Text above the figure.")
def timeline(trace: Path, out: Path, from_ms: float | None, to_ms: float | None, title: str | None) -> None:
    """Draw TRACE, written by `pipedec generate --trace`: one lane per rank and one for the scheduler."""
    from pipedec.bench.record import check_writable
    from pipedec.bench.report.timeline import draw_timeline, read_timeline

    check_writable(out)
    drawn = read_timeline(trace).between(from_ms, to_ms)
    draw_timeline(drawn, out, title)
    console.print(f"{len(drawn.bars)} tasks, {drawn.start_ms:.1f} to {drawn.end_ms:.1f} ms, in {out}")
