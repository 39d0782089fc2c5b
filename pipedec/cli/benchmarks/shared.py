"""What several ``pipedec bench`` commands share: flags for prompts and models, the results file, a text about the machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipedec.cli.options import Command, gathered
from pipedec.cli.show import console
from pipedec.config import load_cluster, paper_cluster
from pipedec.core import SamplingParams, UserError
from pipedec.data.prompts import PromptSet, PromptSource

PATH = click.Path(path_type=Path)
OUT_HELP = "Append the results to this JSONL file."


@dataclass(frozen=True)
class QuestionFlags:
    """Prompts, sampling, models and the emulated cluster."""

    cluster: Path | None
    sources: tuple[str, ...]
    field: str | None
    texts: tuple[str, ...]
    raw_prompt: bool
    samples: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    target: Path | None
    draft: str | None
    own_work: bool

    def settings(self) -> dict[str, Any]:
        """The fields that the configurations of all these commands have."""
        sampling = SamplingParams(self.temperature, self.top_k, self.top_p, max_tokens=self.max_tokens)
        return {
            "cluster": load_cluster(self.cluster) if self.cluster else paper_cluster(), "samples": self.samples,
            "seed": self.seed, "sampling": sampling, "raw_prompts": self.raw_prompt, "own_work": self.own_work,
        }  # fmt: skip

    def prompt_sets(self) -> list[PromptSet]:
        """The prompt sets. Raises UserError if there are none, or one cannot be read."""
        sets = [PromptSource.parse(source).read(self.field) for source in self.sources]
        if self.texts:
            sets.append(PromptSet("prompt", self.texts))
        if not sets:
            raise UserError("no prompts: give --prompts FILE or --prompt TEXT")
        return sets


def question_options(command: Command) -> Command:
    """Adds these flags; the command gets them as ``asked``."""
    options = [
        click.option("--cluster", type=PATH, help="A cluster.yaml whose partitions are the presets (default: the paper's)."),
        click.option(
            "--prompts",
            "sources",
            multiple=True,
            help="[NAME=]FILE[#KEY=VALUE,…]: JSONL, JSONL.gz or CSV, or some records of it.",
        ),
        click.option("--field", help="The field of the prompt files that holds the prompt."),
        click.option("--prompt", "texts", multiple=True, help="A prompt; may be repeated."),
        click.option("--raw-prompt", is_flag=True, help="Do not apply the model's chat template."),
        click.option("--samples", type=int, default=10, show_default=True, help="Number of prompts chosen from each set."),
        click.option(
            "--seed",
            type=int,
            default=0,
            show_default=True,
            help="Seed for choosing prompts and for sampling.",
        ),
        click.option(
            "--temperature", type=float, default=0.0, show_default=True, help="Sampling temperature; 0: greedy decoding."
        ),
        click.option("--top-k", type=int, default=0, show_default=True, help="Sample from the N most probable tokens; 0: all."),
        click.option(
            "--top-p",
            type=float,
            default=1.0,
            show_default=True,
            help="Sample from the most probable tokens whose probabilities reach this sum.",
        ),
        click.option("--max-tokens", type=int, default=64, show_default=True, help="Maximum number of tokens of an answer."),
        click.option("--target", type=PATH, help="Target checkpoint directory (default: the shipped pair)."),
        click.option("--draft", help="Draft checkpoint directory, or none."),
        click.option(
            "--own-work/--no-own-work", default=True, show_default=True,
            help="Count rank 0's own work in computed times, as measured on this machine.",
        ),
    ]  # fmt: skip
    return gathered(command, options, QuestionFlags, "asked")


def numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UserError(f"{flag} {text}: write numbers with commas between them, like 1,4,8") from None


def comma_numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Callback of an option whose value is numbers with commas between them."""
    return numbers(parameter.opts[0], text)


def append(out: Path | None, rows: Iterable[dict[str, Any]]) -> None:
    """Append ``rows`` to the results file, if one was given, and report it."""
    from pipedec.bench.record import append_rows

    if out is not None:
        append_rows(out, rows)
        console.print(f"Results appended to {out}")


def machine_text(row: dict[str, Any]) -> str:
    """For a caption: the machine of a row whose configuration has ``device`` and ``threads``."""
    machine, config = row["machine"], row["config"]
    if config["device"] == "cuda":
        return f"{machine['gpu']}, torch {machine['torch']}"
    load = f"load average before: {machine['load_average']}"
    return f"{machine['cpu']}, {machine['cores']} cores, threads: {config['threads']}, {load}, torch {machine['torch']}"
