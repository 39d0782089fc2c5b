"""``pipedec bench``: the table of benchmarks, one module each."""

from __future__ import annotations

import click

from pipedec.cli.main import LazyGroup

BENCHMARKS = {
    "sweep": ("pipedec.cli.benchmarks.sweep", "Methods × stage counts × trees × prompt sets, one JSONL row per answer."),
    "load": ("pipedec.cli.benchmarks.load", "Many requests at once: latencies, throughput and goodput under load."),
    "threads": ("pipedec.cli.benchmarks.threads", "Answers in one thread and in several, with speculation and without."),
    "plot": ("pipedec.cli.benchmarks.plot", "Figures from the rows of a sweep."),
    "overhead": ("pipedec.cli.benchmarks.overhead", "The fixed cost of a timestep beside the bare transport."),
    "timeline": ("pipedec.cli.benchmarks.timeline", "A figure of a trace."),
}


@click.group(cls=LazyGroup, lazy_commands=BENCHMARKS)
def bench() -> None:
    """Measure. Every result is written with the machine, the revision and the whole configuration."""
