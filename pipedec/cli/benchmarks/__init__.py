"""``pipedec bench``: the table of benchmarks, one module each."""

from __future__ import annotations

import click

from pipedec.cli.main import LazyGroup

BENCHMARKS = {
    "sweep": ("pipedec.cli.benchmarks.sweep", "Methods × stage counts × trees × prompt sets, one JSONL row per answer."),
    "plot": ("pipedec.cli.benchmarks.plot", "Figures from the rows of a sweep."),
    "timeline": ("pipedec.cli.benchmarks.timeline", "A figure of a trace."),
}


@click.group(cls=LazyGroup, lazy_commands=BENCHMARKS)
def bench() -> None:
    """Measure. Every result is written with the machine, the revision and the whole configuration."""
