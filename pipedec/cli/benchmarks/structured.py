"""``pipedec bench structured``: answers that follow a JSON Schema, by every method."""

from __future__ import annotations

from collections.abc import Callable

import click

from pipedec.bench.options import ClusterFile, SamplingSeed
from pipedec.bench.structured.benchmark import StructuredBench, StructuredConfig
from pipedec.bench.structured.summary import document, markdown
from pipedec.cli.benchmarks.shared import OutDirectory
from pipedec.cli.benchmarks.sweep import ProgressBar
from pipedec.cli.options import MaxTokens, Temperature
from pipedec.cli.show import console
from pipedec.config import load_cluster, paper_cluster
from pipedec.core import SamplingParams, UserError
from pipedec.flags import own_options, partial_of


@click.command()
@partial_of(StructuredConfig, "measured")
@own_options
def structured(
    measured: Callable[..., StructuredConfig],
    out: OutDirectory,
    cluster: ClusterFile = None,
    max_tokens: MaxTokens = 80,
    temperature: Temperature = 0.0,
    seed: SamplingSeed = 0,
) -> None:
    """Answer thirty questions with a JSON Schema for each, and without: one row per answer in OUT/rows.jsonl.

    All stages run in one process; times are computed for the preset. Writes OUT/summary.md and OUT/summary.json. Answers that
    OUT/rows.jsonl already contains are not measured again.
    """
    config = measured(
        cluster=load_cluster(cluster) if cluster else paper_cluster(),
        sampling=SamplingParams(temperature, seed=seed if temperature else None, max_tokens=max_tokens),
    )
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: not a directory")
    with ProgressBar() as bar:
        rows = StructuredBench(config, out, bar).run()
    text = markdown(rows)
    (out / "summary.md").write_text(text, encoding="utf-8")
    (out / "summary.json").write_text(document(rows), encoding="utf-8")
    print(text, end="")
    for file in (out / "rows.jsonl", out / "summary.md", out / "summary.json"):
        console.print(str(file), markup=False, soft_wrap=True)
