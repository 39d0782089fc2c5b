"""``pipedec train draft`` and ``pipedec train bita``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from pipedec.checkpoints.download import downloaded
from pipedec.cli.main import moved_flags
from pipedec.cli.options import RunningFlags, running_options
from pipedec.core.errors import UserError
from pipedec.directories import reference_pair
from pipedec.flags import Help, options_of, own_options
from pipedec.train.acceptance import measure_acceptance, some_answers
from pipedec.train.bita import BitaRecipe, print_bita, target_answers, train_bita
from pipedec.train.continuations import invented_sets
from pipedec.train.draft import DraftRecipe, train_draft
from pipedec.train.measuring import print_draft
from pipedec.train.options import (
    BitaStart,
    Compiled,
    DeviceFlags,
    DraftStart,
    OnlyAcceptance,
    OnlyAnswers,
    PartialRun,
    Target,
    TrainingPromptFlags,
    bita_options,
    chosen_start,
    device_options,
    existing_draft,
    prompter_of,
    run_options,
    shape_options,
)
from pipedec.train.pipelining import PATIENCE
from pipedec.train.replicas import replicas
from pipedec.train.run import Run
from pipedec.train.targets import FrozenTarget, LoadedTarget, RunningTarget

_RECIPE = "in a checkout of pipedec, use python -m recipes.reference_models"


def _target_of(path: Path, place: RunningFlags, run: Run) -> FrozenTarget:
    """In the cluster that is given, else in this process. Raises UserError if there is no such cluster with this target."""
    return RunningTarget.of(place.connect(), path) if place.are_given else LoadedTarget.of(path, run)


@click.command()
@running_options
@options_of(TrainingPromptFlags, "asked")
@run_options
@options_of(DraftRecipe, "recipe")
@shape_options
@device_options
@moved_flags({"--problems": True}, f"has moved: {_RECIPE} draft")
@own_options
def draft(
    place: RunningFlags,
    asked: TrainingPromptFlags,
    run: PartialRun,
    recipe: DraftRecipe,
    shape: dict[str, Any],
    device: DeviceFlags,
    target: Target = None,
    start: DraftStart = None,
    invented: Annotated[int | None, Help("So many prompts that the target invents itself.")] = None,
    compiled: Compiled = True,
    only_acceptance: OnlyAcceptance = False,
) -> None:
    """Train a draft for a target, on the target's own answers to prompts: a new one, or one that is continued."""
    if invented is None or asked.prompts:
        asked.check(f", --invented COUNT (the shipped draft: {_RECIPE} draft)")
    target, begun = chosen_start(target, start, shape)
    if only_acceptance:
        existing_draft(begun)
    prompter = prompter_of(target, recipe.long_length)
    prompts = asked.read(prompter, recipe.new_tokens) if asked.prompts else {}
    with replicas(device.chosen()["device"]) as together:
        where = run(**device.chosen(), replicas=together)
        frozen = _target_of(target, place, where)
        if invented is not None:
            prompts |= invented_sets(frozen, prompter, invented, recipe.new_tokens, where, recipe.seed)
        if only_acceptance:
            answered = some_answers(frozen, prompts, recipe.new_tokens, where)
            if together.is_first:
                measure_acceptance(target, existing_draft(begun), answered, where.out / "draft")
            return
        report = train_draft(target, begun, prompts, recipe.with_long_sets(prompts), where, compiled=compiled, target=frozen)
    if report:
        print_draft(report)


@click.command()
@running_options
@bita_options
@moved_flags({"--library": False, "--problems": True}, f"has moved: {_RECIPE} bita")
@own_options
def bita(
    place: RunningFlags,
    asked: TrainingPromptFlags,
    run: PartialRun,
    recipe: BitaRecipe,
    device: DeviceFlags,
    target: Target = None,
    start: BitaStart = None,
    only_answers: OnlyAnswers = False,
) -> None:
    """Train BiTA for a frozen target: masks and a prompt that predict tokens ahead, learned from its own greedy answers."""
    asked.check()
    if only_answers != place.are_given:
        raise UserError("--only-answers and a running cluster (--redis, --run or --running) go together: give both or neither")
    target = downloaded(target or reference_pair() / "target")
    prompts = asked.read(prompter_of(target), recipe.new_tokens)
    if only_answers:
        where = run(**device.chosen())
        target_answers(_target_of(target, place, where), target, prompts, recipe, where)
        print(
            f"{where.work} has all answers. Next, where --target fits: the same command without --only-answers and its cluster."
        )
        return
    with replicas(device.chosen()["device"], PATIENCE) as together:
        report = train_bita(target, prompts, recipe, run(**device.chosen(), replicas=together), start)
    if report:
        print_bita(report)
