"""``pipedec bench alternatives``: the same prompts through what one would use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.cli.benchmarks.shared import OUT_HELP, PATH, append, machine_text
from pipedec.cli.show import console
from pipedec.core import UserError


@click.command()
@click.option("--target", type=PATH, help="Target checkpoint directory (default: the shipped pair).")
@click.option("--draft", help="Draft checkpoint directory, or none.")
@click.option("--bita", help="A directory with the target's trained BiTA, or none (default: the shipped one).")
@click.option("--stages", type=int, default=4, show_default=True, help="Stages of the method pipedec, all in this process.")
@click.option("--prompt", "texts", multiple=True, help="A prompt; may be given several times.")
@click.option("--prompts", "files", multiple=True, type=PATH, help="A JSONL, JSONL.gz or CSV prompt file; several times.")
@click.option("--field", help="The field of the prompt files that holds the prompt.")
@click.option("--samples", type=int, default=10, show_default=True, help="Prompts drawn from each file (seed 0).")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Output tokens at most.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Times that each contender answers each prompt.")
@click.option("--threads", type=int, help="Threads that torch computes with (default: its own choice).")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--out", type=PATH, help=OUT_HELP)
def alternatives(
    target: Path | None, draft: str | None, bita: str | None, stages: int, texts: tuple[str, ...], files: tuple[Path, ...],
    field: str | None, samples: int, max_tokens: int, repeats: int, threads: int | None, device: str, out: Path | None,
) -> None:  # fmt: skip
    """What one would use instead: transformers (greedy, assisted, prompt lookup) beside pipedec, in one process.

    Same checkpoint, same prompts, float32, greedy; nothing is emulated. Answers end at an end token or at --max-tokens.
    """
    from pipedec.bench.alternatives.benchmark import AlternativesConfig, measure_alternatives
    from pipedec.bench.record import check_writable
    from pipedec.engine.spec import PipelineSpec

    config = AlternativesConfig(max_tokens, repeats, threads)
    prompts = _prompts(texts, files, field, samples)
    check_writable(out)
    spec = PipelineSpec.create(target, draft, stages, device=device, bita=bita)
    with console.status("loading") as status:
        rows = measure_alternatives(spec, prompts, config, lambda had, total: status.update(f"answer {had} of {total}"))
    Console().print(_table(rows))
    append(out, rows)


def _prompts(texts: tuple[str, ...], files: tuple[Path, ...], field: str | None, samples: int) -> list[str]:
    from pipedec.data.prompts import read_prompts

    if samples < 1:
        raise UserError(f"--samples must be at least 1, not {samples}")
    prompts = [*texts, *(text for path in files for text in read_prompts(path, field).sample(samples).prompts)]
    if not prompts:
        raise UserError("nothing to answer: give --prompt TEXT or --prompts FILE")
    return prompts


def _table(rows: list[dict[str, Any]]) -> Table:
    config, greedy = rows[0]["config"], rows[0]
    table = Table(title="The same prompts by other means, in one process", caption=_caption(greedy))
    table.title_justify = table.caption_justify = "left"
    table.add_column("", no_wrap=True)
    for name in ("tokens/s", "ratio", "ms per token", "passes per token", "rows per token", "same tokens"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            row["contender"], f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_second'] / greedy['tokens_per_second']:.2f}×",
            f"{row['ms_per_token']:.2f}", f"{row['passes_per_token']:.2f}", f"{row['rows_per_token']:.1f}",
            f"{row['equal']}/{config['prompts']}",
        )  # fmt: skip
    return table


def _caption(row: dict[str, Any]) -> str:
    config = row["config"]
    return (
        f"Wall time of whole answers, prefill included. Prompts: {config['prompts']}; tokens: {row['tokens']}; runs of each: "
        f"{config['repeats']}, of which the median counts, contenders in turns. {machine_text(row)}, "
        f"{config['pipeline']['dtype']}. transformers "
        f"{row['transformers']} with its key-value cache; assisted by the same draft with the default heuristics; lookup with "
        "prompt_lookup_num_tokens=10. Ratio and same tokens: to transformers greedy. Passes and rows are the target's, rows "
        "those beyond the prompt.\n"
        "pipedec's stages run one after another in this process. On one machine a pipeline cannot be faster than one process, "
        "since its stages share the cores; stages are for targets that one device cannot hold or cannot read fast enough."
    )
