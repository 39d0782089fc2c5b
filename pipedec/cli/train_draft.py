"""``pipedec train draft``: a new draft for a target, or one that is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from pipedec.cli.options import Command
from pipedec.cli.train_options import PromptFlags, moved_option, print_table, recipe_command
from pipedec.cli.train_run import Compiled, DeviceFlags, PartialRun, device_options, run_options
from pipedec.config import Settings
from pipedec.config.model_config import ModelConfig
from pipedec.core import UserError
from pipedec.engine.build import resolve
from pipedec.flags import Help, given_values, option_fields, options_of, own_options, with_options
from pipedec.text.prompt import Prompter
from pipedec.train.cards.cells import top_k_cells
from pipedec.train.draft.fresh import DraftShape
from pipedec.train.draft.measuring import DEPTHS
from pipedec.train.draft.training import DraftRecipe, train_draft
from pipedec.train.invented import invented_set
from pipedec.transport.replicas import replicas

DraftTarget = Annotated[Path | None, Help("Target checkpoint (default: the shipped pair's).", "DIR")]
DraftStart = Annotated[
    Path | None, Help("Draft checkpoint directory to continue (default: a new one, beside --target).", "DIR", "--draft")
]
_AGREEMENT_COLUMNS = ("target loss", "draft loss", "top 1", "top 4", "top 16")


def shape_options(command: Command) -> Command:
    """Add the size of a new draft; the command gets what is given of it as ``shape``."""
    return with_options(command, option_fields(DraftShape), lambda values: {"shape": given_values(values)})


@click.command()
@options_of(PromptFlags, "asked")
@run_options
@options_of(DraftRecipe, "recipe")
@shape_options
@device_options
@moved_option("--problems", recipe_command("draft"))
@own_options
def draft(
    asked: PromptFlags,
    run: PartialRun,
    recipe: DraftRecipe,
    shape: dict[str, Any],
    device: DeviceFlags,
    target: DraftTarget = None,
    start: DraftStart = None,
    invented: Annotated[int | None, Help("So many prompts that the target invents itself.")] = None,
    compiled: Compiled = True,
) -> None:
    """Train a draft for a target, on the target's own greedy answers to prompts: a new one, or one that is continued."""
    if invented is None or asked.prompts:
        asked.check(f", --invented COUNT (the shipped draft: {recipe_command('draft')})")
    target, begun = chosen_start(target, start, shape)
    prompter = prompter_of(target, recipe.long_length)
    prompts = asked.read(prompter, recipe.new_tokens) if asked.prompts else {}
    with replicas(device.chosen()["device"].type) as together:
        where = run(**device.chosen(), replicas=together)
        if invented is not None:
            prompts |= invented_set(target, prompter, invented, recipe.new_tokens, where, recipe.seed)
        report = train_draft(target, begun, prompts, recipe.with_long_sets(prompts), where, compiled=compiled)
    if report:
        print_draft(report)


def chosen_start(target: Path | None, draft: Path | None, shape: dict[str, Any]) -> tuple[Path, Path | DraftShape]:
    """The target, and the draft to continue or the size of a new one. Raises UserError if they do not fit each other."""
    if draft is not None and shape:
        raise UserError("--draft continues a draft, whose size is given: leave out --hidden-size, --layers and --vocabulary")
    if draft is not None or (target is None and not shape):
        return chosen_pair(target, draft)
    return resolve(Settings.of(target=target, draft="none", stages=1)).target, DraftShape(**shape)


def chosen_pair(target: Path | None, draft: Path | None) -> tuple[Path, Path]:
    """The checkpoints, by default the shipped ones. Raises UserError if they do not fit each other."""

    pair = resolve(Settings.of(target=target, draft=draft, stages=1))
    if pair.draft is None:
        raise UserError("--draft none: give the directory of a draft to continue")
    return pair.target, pair.draft


def prompter_of(target: Path, max_tokens: int | None = None) -> Prompter:
    """The tokenizer of a target; prompts are limited to its context, and to ``max_tokens``. Raises UserError if unfit."""
    context = ModelConfig.from_directory(target).max_positions
    return Prompter(target, context if max_tokens is None else min(context, max_tokens))


def print_draft(report: dict[str, Any]) -> None:
    """Print how well a continued draft agrees with its target, before and after."""
    before = report["continuations"][-1]["before"]
    for title, key in (("Held-out text", "held_out"), ("The target's own continuations", "on_policy")):
        print_agreement(f"{title}, before", before[key])
        print_agreement(title, report[key])
    print_chains("Share of positions whose next tokens are all among the top k, before", before["on_policy"])
    print_chains("Share of positions whose next tokens are all among the top k", report["on_policy"])


def print_chains(title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print acceptance by rank and depth; nothing if there is none."""
    lines = [
        (family, k, *(f"{share:.1%}" for share in shares))
        for family, row in rows.items()
        for k, shares in row.get("chains", {}).items()
    ]
    if lines:
        print_table(title, ("text", "k", *(f"{depth} tokens" for depth in DEPTHS)), lines)


def print_agreement(title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print losses and agreement by family of text; nothing if there are none."""
    if rows:
        print_table(title, ("text", *_AGREEMENT_COLUMNS), [(family, *_agreement_cells(row)) for family, row in rows.items()])


def _agreement_cells(row: dict[str, Any]) -> list[str]:
    return [*(f"{row[key]:.3f}" if key in row else "" for key in ("target_loss", "draft_loss")), *top_k_cells(row)]
