"""``pipedec bench alternatives``: the same prompts through transformers and pipedec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.cli.benchmarks.shared import OUT_HELP, PATH, append, machine_text
from pipedec.cli.options import Command, gathered
from pipedec.cli.show import console
from pipedec.config import Settings
from pipedec.core import UserError
from pipedec.engine.build import resolve


@dataclass(frozen=True)
class PairFlags:
    """The models, and the stages of the method that is measured on several (see ``PipelineSpec.create``)."""

    target: Path | None
    draft: str | None
    bita: str | None
    stages: int
    device: str


@dataclass(frozen=True)
class PromptFlags:
    """Where the prompts come from."""

    texts: tuple[str, ...]
    files: tuple[Path, ...]
    field: str | None
    samples: int

    def read(self) -> list[str]:
        """All prompts. Raises UserError if there are none, or a file cannot be read."""
        from pipedec.data.prompts import read_prompts

        if self.samples < 1:
            raise UserError(f"--samples must be at least 1, not {self.samples}")
        drawn = (text for path in self.files for text in read_prompts(path, self.field).sample(self.samples).prompts)
        prompts = [*self.texts, *drawn]
        if not prompts:
            raise UserError("no prompts: give --prompt TEXT or --prompts FILE")
        return prompts


def _pair_options(command: Command) -> Command:
    options = [
        click.option("--target", type=PATH, help="Target checkpoint directory (default: the shipped pair)."),
        click.option("--draft", help="Draft checkpoint directory, or none."),
        click.option("--bita", help="Directory of BiTA trained for the target, or none (default: the shipped one)."),
        click.option(
            "--stages",
            type=int,
            default=4,
            show_default=True,
            help="Stages of pipedec's default method, in one process.",
        ),
        click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    ]
    return gathered(command, options, PairFlags, "pair")


def _prompt_options(command: Command) -> Command:
    options = [
        click.option("--prompt", "texts", multiple=True, help="A prompt; may be repeated."),
        click.option("--prompts", "files", multiple=True, type=PATH, help="JSONL, JSONL.gz or CSV prompt file; may be repeated."),
        click.option("--field", help="The field of the prompt files that holds the prompt."),
        click.option("--samples", type=int, default=10, show_default=True, help="Prompts sampled from each file (seed 0)."),
    ]
    return gathered(command, options, PromptFlags, "prompts")


@click.command()
@_pair_options
@_prompt_options
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Maximum number of output tokens.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Number of times each contender answers each prompt.")
@click.option("--threads", type=int, help="Number of CPU threads torch uses (default: torch's choice).")
@click.option("--out", type=PATH, help=OUT_HELP)
def alternatives(
    pair: PairFlags, prompts: PromptFlags, max_tokens: int, repeats: int, threads: int | None, out: Path | None
) -> None:
    """Compare pipedec with transformers (greedy, assisted, prompt lookup) in one process.

    Same checkpoint, same prompts, float32, greedy; nothing is emulated. Answers end at an end token or at --max-tokens.
    """
    from pipedec.bench.alternatives.benchmark import AlternativesConfig, measure_alternatives
    from pipedec.bench.record import check_writable

    config = AlternativesConfig(max_tokens, repeats, threads)
    texts = prompts.read()
    check_writable(out)
    spec = resolve(
        Settings.of(target=pair.target, draft=pair.draft, bita=pair.bita, stages=pair.stages, dtype="float32", device=pair.device)
    )
    with console.status("loading") as status:
        rows = measure_alternatives(spec, texts, config, lambda done, total: status.update(f"answer {done} of {total}"))
    Console().print(_table(rows))
    append(out, rows)


def _table(rows: list[dict[str, Any]]) -> Table:
    config, greedy = rows[0]["config"], rows[0]
    table = Table(title="The same prompts by transformers and pipedec, in one process", caption=_caption(greedy))
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
        f"{config['repeats']}, of which the median is reported; contenders take turns. {machine_text(row)}, "
        f"{config['pipeline']['dtype']}. transformers "
        f"{row['transformers']} with its KV cache; assisted: the same draft with the default heuristics; lookup: "
        "prompt_lookup_num_tokens=10. Ratio and same tokens: compared with transformers greedy. Passes and rows are the "
        "target's, prompt rows excluded.\n"
        "pipedec's stages run one after another in this process. On one machine a pipeline cannot be faster than one process, "
        "since its stages share the cores; stages are for targets that one device cannot hold or cannot read fast enough."
    )
