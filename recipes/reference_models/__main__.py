"""``python -m recipes.reference_models``: the commands that made the shipped models, in a checkout of pipedec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import click
import torch
from msgspec import Meta

from pipedec.directories import reference_pair
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.train import options
from pipedec.train.acceptance import measure_acceptance, some_answers
from pipedec.train.bita import BitaRecipe, print_bita, train_bita
from pipedec.train.draft import DraftRecipe
from pipedec.train.measuring import print_agreement, print_draft
from pipedec.train.replicas import replicas
from pipedec.train.targets import LoadedTarget
from recipes.reference_models.draft import DRAFT_RECIPE, LIBRARY, bita_prompts, draft_prompts, train_library_draft
from recipes.reference_models.invented_prompts import write_prompts
from recipes.reference_models.library_questions import write_questions
from recipes.reference_models.pair import MixtureRecipe, Recipe, train_mixture, train_pair
from recipes.thread_models.records import Problems, existing


@click.group()
def reference_models() -> None:
    """Train the models that pipedec ships."""


StepsScale = Annotated[float, Meta(gt=0), Help("Factor on all step counts; 0.01 is a try-out.")]


@reference_models.command()
@options.run_options
@own_options
def pair(
    run: options.PartialRun, problems: Problems = None, steps_scale: StepsScale = 1.0, compiled: options.Compiled = True
) -> None:
    """Train target and draft on the Python standard library and word problems."""
    existing(problems)
    report = train_pair(problems, Recipe().scaled(steps_scale), run(), compiled)
    print_agreement("Held-out text", report["held_out"])


@reference_models.command()
@options.run_options
@own_options
def mixture(
    run: options.PartialRun, problems: Problems = None, steps_scale: StepsScale = 1.0, compiled: options.Compiled = True
) -> None:
    """Train a mixture of experts that begins as the shipped pair's target, for which the command draft continues its draft."""
    existing(problems)
    report = train_mixture(problems, reference_pair(), MixtureRecipe().scaled(steps_scale), run(), compiled)
    print_agreement("Held-out text, beside the shipped draft", report["held_out"])


@reference_models.command()
@options.run_options
@options_of(DraftRecipe, "recipe")
@options.shape_options
@own_options
def draft(
    run: options.PartialRun,
    recipe: DraftRecipe,
    shape: dict[str, Any],
    problems: Problems = None,
    times: Annotated[int, Meta(ge=1), Help("So many times as much text and as many prompts as the recipe's.")] = 1,
    target: options.Target = None,
    start: options.DraftStart = None,
    compiled: options.Compiled = True,
    only_acceptance: options.OnlyAcceptance = False,
) -> None:
    """Train the draft of a trained pair, on text of the library and on its target's answers to prompts made of it."""
    existing(problems)
    chosen, library = replace(recipe, long_sets=DRAFT_RECIPE.long_sets), LIBRARY.times(times)
    target, begun = options.chosen_start(target, start, shape)
    with replicas(torch.device("cpu")) as together:
        where = run(replicas=together)
        if only_acceptance:
            prompts = draft_prompts(target, problems, library, chosen)
            answered = some_answers(LoadedTarget.of(target, where), prompts, chosen.new_tokens, where)
            measure_acceptance(target, options.existing_draft(begun), answered, where.out / "draft")
        elif report := train_library_draft(target, begun, problems, chosen, where, library, compiled):
            print_draft(report)


@reference_models.command()
@options.bita_options
@own_options
def bita(
    asked: options.TrainingPromptFlags,
    run: options.PartialRun,
    recipe: BitaRecipe,
    device: options.DeviceFlags,
    problems: Problems = None,
    target: options.Target = None,
    start: options.BitaStart = None,
) -> None:
    """Train the shipped target's BiTA, on its own greedy answers to the draft's prompts and to those of --prompts."""
    existing(problems)
    target = target or reference_pair() / "target"
    library = bita_prompts(target, problems, recipe.new_tokens, asked.max_prompts)
    prompts = library | asked.read(options.prompter_of(target), recipe.new_tokens, tuple(library))
    print_bita(train_bita(target, prompts, recipe, run(**device.chosen()), start))


@reference_models.command()
@own_options
def questions(
    out: Annotated[Path, Help("JSONL, for recipes.thread_models annotate --in.", "FILE")],
    problems: Problems = None,
    seed: Annotated[int, Help("Seed of the wordings.")] = 0,
) -> None:
    """Write the questions that the Python standard library answers, and lists of word problems."""
    existing(problems)
    click.echo(f"{write_questions(out, problems, seed)} written to {out}")


@reference_models.command()
@own_options
def prompts(
    files: Annotated[
        tuple[Path, ...],
        Help("Questions (JSONL) of the command questions; may be repeated.", "FILE", "--in", repeated=True),
    ],
    out: Annotated[Path, Help("JSONL, for recipes.thread_models pasta-sft --prompts.", "FILE")],
    count: Annotated[int, Meta(ge=1), Help("Number of prompts.")] = 1000,
    seed: Annotated[int, Help("Seed of the exchange.")] = 0,
) -> None:
    """Write prompts without answers: questions with other names and numbers."""
    click.echo(f"{write_prompts(files, count, out, seed)} written to {out}")


if __name__ == "__main__":
    run_command(reference_models)
