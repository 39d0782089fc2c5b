"""``pipedec train``: the models the project ships."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.core import UserError


@click.group()
def train() -> None:
    """Train the models the project ships."""


@train.command()
@click.option("--problems", type=click.Path(path_type=Path), help="Word problems in the GSM8K JSONL format (training split).")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where target/ and draft/ are written.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Checkpoints; a second run continues from them.")
@click.option("--steps-scale", type=float, default=1.0, show_default=True, help="Multiplies all steps; 0.01 is a try-out.")
@click.option("--threads", type=int, default=2, show_default=True, help="CPU threads.")
@click.option("--compile/--no-compile", "compiled", default=True, help="torch.compile (needs a C++ compiler).")
def reference(problems: Path | None, out: Path, work: Path, steps_scale: float, threads: int, compiled: bool) -> None:
    """Train the reference pair on the Python standard library and word problems."""
    from pipedec.train.reference import Recipe, train

    if problems is not None and not problems.is_file():
        raise UserError(f"--problems {problems}: there is no such file")
    if steps_scale <= 0:
        raise UserError("--steps-scale must be above 0")
    recipe = Recipe()
    scaled: dict[str, Any] = {
        name: tuple((layers, max(1, round(steps * steps_scale))) for layers, steps in getattr(recipe, name))
        for name in ("phases", "draft_phases", "distillation_phases")
    }
    report = train(problems, out, work, replace(recipe, **scaled), compiled, threads)
    _print_agreement("Held-out text", report["held_out"])


@train.command()
@click.option("--target", type=click.Path(path_type=Path), help="Target checkpoint directory (default: the shipped pair).")
@click.option("--draft", type=click.Path(path_type=Path), help="Draft checkpoint directory to start from.")
@click.option("--problems", type=click.Path(path_type=Path), help="Word problems in the GSM8K JSONL format (training split).")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where draft/ and training.json are written.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Checkpoints; a second run continues from them.")
@click.option("--steps", type=int, help="Training steps (default: the recipe's).")
@click.option("--threads", type=int, default=2, show_default=True, help="CPU threads.")
@click.option("--compile/--no-compile", "compiled", default=True, help="torch.compile (needs a C++ compiler).")
def draft(
    target: Path | None,
    draft: Path | None,
    problems: Path | None,
    out: Path,
    work: Path,
    steps: int | None,
    threads: int,
    compiled: bool,
) -> None:
    """Continue the draft of a trained pair, on text and on what its target says by itself."""
    from pipedec.engine.spec import PipelineSpec
    from pipedec.train.draft import DraftRecipe, continue_draft

    if problems is not None and not problems.is_file():
        raise UserError(f"--problems {problems}: there is no such file")
    if steps is not None and steps < 1:
        raise UserError("--steps must be at least 1")
    pair = PipelineSpec.create(target, draft, stages=1)
    if pair.draft is None:
        raise UserError("--draft none: give the directory of a draft to continue")
    recipe = DraftRecipe() if steps is None else DraftRecipe(steps=steps)
    report = continue_draft(pair.target, pair.draft, problems, out, work, recipe, compiled, threads)
    before = report["continuations"][-1]["before"]
    _print_agreement("Held-out text, before", before["held_out"])
    _print_agreement("Held-out text", report["held_out"])
    _print_agreement("The target's own continuations, before", before["on_policy"])
    _print_agreement("The target's own continuations", report["on_policy"])


@train.command()
@click.option("--target", type=click.Path(path_type=Path), help="Target checkpoint directory (default: the shipped pair's).")
@click.option("--prompts", multiple=True, metavar="[NAME=]FILE[#KEY=VALUE]", help="Prompts to learn from; may be repeated.")
@click.option("--library", is_flag=True, help="Also learn from prompts made of the Python standard library, as train draft.")
@click.option("--problems", type=click.Path(path_type=Path), help="With --library: word problems in the GSM8K JSONL format.")
@click.option("--max-prompts", type=int, help="At most so many prompts of each set (default: all).")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where the weights and training.json are written.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Checkpoint; a second run continues from it.")
@click.option("--masks", type=int, help="Masks in a group (default: 3).")
@click.option("--prompt-tokens", type=int, help="Tokens of the learned prompt (default: 16; 0 with --prompting none).")
@click.option("--prompting", help="deep (keys and values of every layer), shallow (input embeddings) or none (default: deep).")
@click.option("--groups", type=int, help="Groups of masks in a sample, at most (default: 24).")
@click.option("--steps", type=int, help="Training steps (default: 2000).")
@click.option("--batch", type=int, help="Samples in a step (default: 4).")
@click.option("--learning-rate", type=float, help="The highest (default: 0.2; the paper's: 0.03).")
@click.option("--start-std", type=float, help="Standard deviation of the first values (default: 0.5; the paper's: 0.02).")
@click.option("--new-tokens", type=int, help="Tokens of an answer, at most (default: 96).")
@click.option("--seed", type=int, help="Order of samples, places of groups, where learning begins (default: 0).")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="Target's format."
)
@click.option("--threads", type=int, default=2, show_default=True, help="CPU threads.")
def bita(
    target: Path | None,
    prompts: tuple[str, ...],
    library: bool,
    problems: Path | None,
    max_prompts: int | None,
    out: Path,
    work: Path,
    dtype: str,
    threads: int,
    **wishes: Any,
) -> None:
    """Train masks and a prompt (BiTA) with which a frozen target guesses tokens ahead, on its own greedy answers."""
    from pipedec.engine.prompt_set import PromptSource
    from pipedec.engine.spec import REFERENCE_PAIR
    from pipedec.train.bita import BitaRecipe, train_bita
    from pipedec.train.bita_data import Sources

    if not prompts and not library:
        raise UserError("no prompts to learn from: give --prompts FILE, or --library")
    if problems is not None and not library:
        raise UserError("--problems belongs to --library: give both, or --prompts FILE")
    if problems is not None and not problems.is_file():
        raise UserError(f"--problems {problems}: there is no such file")
    for name, count in (("--max-prompts", max_prompts), ("--threads", threads)):
        if count is not None and count < 1:
            raise UserError(f"{name} must be at least 1")
    given = {name: value for name, value in wishes.items() if value is not None}
    if given.get("prompting") == "none":
        given.setdefault("prompt_tokens", 0)
    sources = Sources(tuple(map(PromptSource.parse, prompts)), library, problems, max_prompts)
    report = train_bita(target or REFERENCE_PAIR / "target", sources, out, work, BitaRecipe(**given), dtype, threads)
    _print_guesses(report["held_out"])


def _print_guesses(held_out: dict[str, dict[str, Any]]) -> None:
    from pipedec.train.bita_card import held_out_cells

    table = Table(title="Held-out prompts: each mask's guesses, tokens a pass", title_justify="left")
    for column in ("prompts", "top 1", "top 5", "loss", "chain", "tree", "groups"):
        table.add_column(column, justify="right" if column != "prompts" else "left")
    for name, row in held_out.items():
        table.add_row(name, *held_out_cells(row))
    Console().print(table)


def _print_agreement(title: str, rows: dict[str, dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("text", "target loss", "draft loss", "top 1", "top 4", "top 16"):
        table.add_column(column, justify="right" if column != "text" else "left")
    for family, row in rows.items():
        losses = (f"{row[key]:.3f}" if key in row else "" for key in ("target_loss", "draft_loss"))
        table.add_row(family, *losses, *(f"{row[key]:.1%}" for key in ("top1", "top4", "top16")))
    Console().print(table)
