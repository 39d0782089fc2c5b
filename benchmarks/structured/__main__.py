"""``python -m benchmarks.structured``: answers that follow a JSON Schema, by every method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import click

from benchmarks.structured.benchmark import StructuredBench, StructuredConfig, document, markdown
from pipedec.bench.options import ClusterFile
from pipedec.cli.benchmarks.shared import OutDirectory, ProgressBar, check_directory, write_summary
from pipedec.cli.options import MaxTokens, Temperature
from pipedec.config import load_cluster, paper_cluster
from pipedec.core import SamplingParams
from pipedec.flags import Help, own_options, partial_of, run_command


@click.command()
@partial_of(StructuredConfig, "measured")
@own_options
def structured(
    measured: Callable[..., StructuredConfig],
    out: OutDirectory,
    cluster: ClusterFile = None,
    max_tokens: MaxTokens = 80,
    temperature: Temperature = 0.0,
    seed: Annotated[int, Help("Seed for sampling.")] = 0,
) -> None:
    """Answer thirty questions with a JSON Schema for each, and without: one row per answer in OUT/rows.jsonl.

    All stages run in one process; times are computed for the preset. Writes OUT/summary.md and OUT/summary.json. Answers that
    OUT/rows.jsonl already contains are not measured again.
    """
    config = measured(
        cluster=load_cluster(cluster) if cluster else paper_cluster(),
        sampling=SamplingParams(temperature, seed=seed if temperature else None, max_tokens=max_tokens),
    )
    check_directory(out)
    with ProgressBar() as bar:
        rows = StructuredBench(config, out, bar).run()
    write_summary(out, markdown(rows), document(rows))


if __name__ == "__main__":
    run_command(structured)
