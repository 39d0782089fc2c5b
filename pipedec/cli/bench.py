"""``pipedec bench``: the table of benchmarks."""

from __future__ import annotations

import click

from pipedec.cli.lazy_group import LazyGroup

BENCHMARKS = {
    "sweep": ("pipedec.cli.benchmarks.sweep", "Methods × stage counts × trees × prompt sets, one JSONL row per answer."),
    "policy": ("pipedec.cli.benchmarks.policy", "Speculation policies compared offline, on recorded answers."),
    "load": ("pipedec.cli.benchmarks.load", "Many requests at once: latencies, throughput and goodput under load."),
    "threads": ("pipedec.cli.benchmarks.threads", "Answers in one thread and in several, with speculation and without."),
    "structured": ("pipedec.cli.benchmarks.structured", "Answers that follow a JSON Schema, by every method, and without one."),
    "plot": ("pipedec.cli.benchmarks.plot", "The paper's figures and tables from the rows of a sweep."),
    "overhead": ("pipedec.cli.benchmarks.overhead", "The fixed cost of a timestep beside the bare transport."),
    "operations": ("pipedec.cli.benchmarks.operations", "Tree growth, prune, commit and attention against tree size."),
    "alternatives": ("pipedec.cli.benchmarks.alternatives", "The same prompts through transformers, in one process."),
    "layers": ("pipedec.cli.benchmarks.layers", "Large layers on this machine's GPU or CPU against its memory bandwidth."),
    "serve": ("pipedec.cli.benchmarks.serve", "The HTTP server beside the Python client."),
    "live": ("pipedec.cli.benchmarks.live", "A recording of methods side by side, for the live page."),
    "timeline": ("pipedec.cli.benchmarks.timeline", "A figure of a trace."),
}


@click.group(cls=LazyGroup, lazy_commands=BENCHMARKS)
def bench() -> None:
    """Measure. Every result is written with the machine, the revision and the whole configuration."""
