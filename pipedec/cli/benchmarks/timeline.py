"""``pipedec bench timeline``: a figure of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from pipedec.bench.record import check_writable
from pipedec.bench.report.timeline import draw_timeline, read_timeline
from pipedec.cli.show import console
from pipedec.flags import Help, own_options


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@own_options
def timeline(
    trace: Path,
    out: Annotated[Path, Help("The figure: a file name ending in .svg, .png or .pdf.", "FILE")],
    from_ms: Annotated[float | None, Help("Start of the figure (default: the first task).")] = None,
    to_ms: Annotated[float | None, Help("End of the figure (default: the last task).")] = None,
    title: Annotated[str | None, Help("Text above the figure.", "TEXT")] = None,
) -> None:
    """Draw TRACE, written by `pipedec generate --trace`: one lane per rank and one for the scheduler."""
    check_writable(out)
    drawn = read_timeline(trace).between(from_ms, to_ms)
    draw_timeline(drawn, out, title)
    console.print(f"{len(drawn.bars)} tasks, {drawn.start_ms:.1f} to {drawn.end_ms:.1f} ms, in {out}")
