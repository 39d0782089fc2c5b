"""``python -m recipes.reference_models``: the commands that made the shipped models, in a checkout of pipedec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipedec.cli.main import main
from pipedec.cli.train import bita_options, chosen_pair, learn_bita, pair_options, print_agreement, print_draft, prompter_of
from pipedec.cli.train_options import PATH, DeviceFlags, PromptFlags, RunFlags, at_least_one, existing, given, run_options
from pipedec.core import UserError

_PROBLEMS = click.option("--problems", type=PATH, help="Word problems in the GSM8K JSONL format (training split).")


@click.group()
def reference_models() -> None:
    """Train the models that pipedec ships."""


@reference_models.command()
@_PROBLEMS
@run_options
@click.option("--steps-scale", type=float, default=1.0, show_default=True, help="Factor on all step counts; 0.01 is a try-out.")
@click.option("--compile/--no-compile", "compiled", default=True, help="torch.compile (needs a C++ compiler).")
def pair(problems: Path | None, run: RunFlags, steps_scale: float, compiled: bool) -> None:
    """Train target and draft on the Python standard library and word problems."""
    from recipes.reference_models.pair import Recipe, train_pair

    existing(problems)
    if steps_scale <= 0:
        raise UserError("--steps-scale must be above 0")
    recipe = Recipe()
    scaled: dict[str, Any] = {
        name: tuple((layers, max(1, round(steps * steps_scale))) for layers, steps in getattr(recipe, name))
        for name in ("phases", "draft_phases", "distillation_phases")
    }
    report = train_pair(problems, replace(recipe, **scaled), run.run(), compiled)
    print_agreement("Held-out text", report["held_out"])


@reference_models.command()
@_PROBLEMS
@pair_options
def draft(problems: Path | None, target: Path | None, draft: Path | None, run: RunFlags, compiled: bool, **recipe: Any) -> None:
    """Continue the draft of a trained pair, on text of the library and on its target's answers to prompts made of it."""
    from recipes.reference_models.draft import DRAFT_RECIPE, continue_library_draft

    existing(problems)
    chosen = replace(DRAFT_RECIPE, **given(recipe))
    print_draft(continue_library_draft(chosen_pair(target, draft), problems, chosen, run.run(), compiled=compiled))


@reference_models.command()
@_PROBLEMS
@bita_options
def bita(
    problems: Path | None, target: Path | None, asked: PromptFlags, run: RunFlags, device: DeviceFlags, **recipe: Any
) -> None:
    """Train the shipped target's BiTA, on its own greedy answers to the draft's prompts and to those of --prompts."""
    from recipes.reference_models.document_prompts import bita_prompts

    existing(problems)
    at_least_one("--max-prompts", asked.max_prompts)

    def prompts_of(path: Path, chosen: Any) -> Any:
        library = bita_prompts(path, problems, chosen.new_tokens, asked.max_prompts)
        return library | asked.read(prompter_of(path), chosen.new_tokens, tuple(library))

    learn_bita(target, prompts_of, run.run(**device.chosen()), recipe)


@reference_models.command()
@_PROBLEMS
@click.option("--out", type=PATH, required=True, help="JSONL, for pipedec train annotate --in.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the wordings.")
def questions(problems: Path | None, out: Path, seed: int) -> None:
    """Write the questions that the Python standard library answers, and lists of word problems."""
    from recipes.reference_models.library_questions import write_questions

    existing(problems)
    click.echo(f"{write_questions(out, problems, seed)} written to {out}")


@reference_models.command()
@click.option(
    "--in", "files", type=PATH, multiple=True, required=True, help="Questions (JSONL) of the command questions; repeatable."
)
@click.option("--count", type=int, default=1000, show_default=True, help="Number of prompts.")
@click.option("--out", type=PATH, required=True, help="JSONL, for pipedec train pasta-sft --prompts.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the exchange.")
def prompts(files: tuple[Path, ...], count: int, out: Path, seed: int) -> None:
    """Write prompts without answers: questions with other names and numbers."""
    from recipes.reference_models.exchanged_prompts import write_prompts

    at_least_one("--count", count)
    click.echo(f"{write_prompts(files, count, out, seed)} written to {out}")


if __name__ == "__main__":
    main(reference_models)
