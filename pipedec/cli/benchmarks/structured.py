"""``pipedec bench structured``: answers that follow a JSON Schema, by every method."""

from __future__ import annotations

from pathlib import Path

import click

from pipedec.cli.benchmarks.shared import PATH, numbers
from pipedec.cli.benchmarks.sweep import ProgressBar
from pipedec.cli.show import console
from pipedec.config import load_cluster, paper_cluster
from pipedec.core import SamplingParams, UserError
from pipedec.methods import METHOD_NAMES


@click.command()
@click.option("--cluster", type=PATH, help="A cluster.yaml whose partitions are the presets (default: the paper's).")
@click.option("--preset", required=True, help="Partition of the emulated cluster, like paper-14.")
@click.option("--stages", help="Stage counts, like 1,4,14, on the preset's first device (default: the preset's own).")
@click.option("--methods", default=",".join(METHOD_NAMES), show_default=True, help="Methods.")
@click.option("--questions", default=30, show_default=True, help="How many of the thirty questions, from the first on.")
@click.option("--max-tokens", default=80, show_default=True, help="Maximum number of tokens of an answer.")
@click.option("--temperature", default=0.0, show_default=True, help="Sampling temperature; 0: greedy decoding.")
@click.option("--seed", default=0, show_default=True, help="Seed for sampling.")
@click.option("--out", type=PATH, required=True, help="Directory of the results; an interrupted run is resumed.")
def structured(
    cluster: Path | None, preset: str, stages: str | None, methods: str, questions: int, max_tokens: int, temperature: float,
    seed: int, out: Path,
) -> None:  # fmt: skip
    """Answer thirty questions with a JSON Schema for each, and without: one row per answer in OUT/rows.jsonl.

    All stages run in one process; times are computed for the preset. Writes OUT/summary.md and OUT/summary.json. Answers that
    OUT/rows.jsonl already contains are not measured again.
    """
    from pipedec.bench.structured.benchmark import StructuredBench, StructuredConfig
    from pipedec.bench.structured.summary import document, markdown

    config = StructuredConfig(
        cluster=load_cluster(cluster) if cluster else paper_cluster(),
        preset=preset,
        stages=numbers("--stages", stages) if stages else (),
        methods=tuple(methods.split(",")),
        questions=questions,
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
