"""``python -m benchmarks.alternatives``: the same prompts through transformers and pipedec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.alternatives.benchmark import AlternativesConfig, measure_alternatives
from benchmarks.machine import machine_text
from pipedec.bench.options import Device, Draft, Positive, Target
from pipedec.bench.record import check_writable
from pipedec.cli.benchmarks.shared import Out, PromptTexts, append
from pipedec.cli.options import PromptField
from pipedec.cli.show import console
from pipedec.config import Settings
from pipedec.core import UserError
from pipedec.data import read_prompts
from pipedec.engine.build import resolve
from pipedec.flags import Help, options_of, own_options, run_command


@dataclass(frozen=True)
class PairFlags:
    """The models, and the stages of the method that is measured on several (see ``PipelineSpec.create``)."""

    target: Target = None
    draft: Draft = None
    bita: Annotated[
        str | None, Help("Directory of BiTA trained for the target, or none (default: the shipped one).", "DIR|none")
    ] = None
    stages: Annotated[int, Help("Stages of pipedec's default method, in one process.")] = 4
    device: Device = "auto"


@dataclass(frozen=True)
class PromptFlags:
    """Where the prompts come from."""

    texts: PromptTexts = ()
    files: Annotated[
        tuple[Path, ...],
        Help("JSONL, JSONL.gz or CSV prompt file; may be repeated.", "FILE", "--prompts", repeated=True),
    ] = ()
    field: PromptField = None
    samples: Annotated[Positive, Help("Prompts sampled from each file (seed 0).")] = 10

    def read(self) -> list[str]:
        """All prompts. Raises UserError if there are none, or a file cannot be read."""
        drawn = (text for path in self.files for text in read_prompts(path, self.field).sample(self.samples).prompts)
        prompts = [*self.texts, *drawn]
        if not prompts:
            raise UserError("no prompts: give --prompt TEXT or --prompts FILE")
        return prompts


@click.command()
@options_of(PairFlags, "pair")
@options_of(PromptFlags, "prompts")
@options_of(AlternativesConfig, "config")
@own_options
def alternatives(pair: PairFlags, prompts: PromptFlags, config: AlternativesConfig, out: Out = None) -> None:
    """Compare pipedec with transformers (greedy, assisted, prompt lookup) in one process.

    Same checkpoint, same prompts, float32, greedy; nothing is emulated. Answers end at an end token or at --max-tokens.
    """
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


if __name__ == "__main__":
    run_command(alternatives)
