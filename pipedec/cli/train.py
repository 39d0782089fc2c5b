"""``pipedec train``: drafts, BiTA, annotated answers, and models that answer in threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipedec.cli.options import gathered
from pipedec.cli.train_annotate import annotate
from pipedec.cli.train_options import (
    PATH,
    Command,
    DeviceFlags,
    PromptFlags,
    RunFlags,
    device_options,
    given,
    moved_option,
    options_of,
    print_table,
    prompt_options,
    recipe_command,
    run_options,
)
from pipedec.cli.train_threads import apar, pasta_bonbon, pasta_sft
from pipedec.config import Settings
from pipedec.core import UserError
from pipedec.engine.build import resolve

if TYPE_CHECKING:
    from pipedec.text.prompt import Prompter
    from pipedec.train.bita.training import BitaRecipe
    from pipedec.train.draft.fresh import DraftShape
    from pipedec.train.prompts import SplitPrompts
    from pipedec.train.run import Run

_AGREEMENT_COLUMNS = ("target loss", "draft loss", "top 1", "top 4", "top 16")


@click.group()
def train() -> None:
    """Train drafts, BiTA and thread-opening models for a target."""


@train.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def reference() -> None:
    """Moved to recipes/."""
    raise UserError(f"pipedec train reference has moved: {recipe_command('pair')}")


def pair_options(command: Command) -> Command:
    """Adds what ``train draft`` needs besides what it learns from."""
    return options_of(
        click.option("--target", type=PATH, help="Target checkpoint (default: the shipped pair)."),
        click.option("--draft", type=PATH, help="Draft checkpoint directory to continue (default: a new one, beside --target)."),
        run_options,
        click.option("--steps", type=int, help="Training steps (default: 500)."),
        click.option("--batch", type=int, help="Rows of a step (default: 10)."),
        click.option("--length", type=int, help="Tokens of a row (default: 512)."),
        click.option("--learning-rate", type=float, help="Peak learning rate (default: 0.004)."),
        click.option("--new-tokens", type=int, help="Maximum number of tokens of an answer (default: 96)."),
        click.option("--seed", type=int, help="Seed of prompts, new weights and the order of rows (default: 2)."),
        click.option("--compile/--no-compile", "compiled", default=True, help="torch.compile (needs a C++ compiler)."),
    )(command)


@dataclass(frozen=True)
class ShapeFlags:
    """The size of a new draft, as far as it is given."""

    hidden_size: int | None
    layers: int | None
    vocabulary: int | None


def shape_options(command: Command) -> Command:
    """Adds the size of a new draft; the command gets it as ``shape``."""
    options = [
        click.option("--hidden-size", type=int, help="Of a new draft (default: 320)."),
        click.option("--layers", type=int, help="Of a new draft (default: 4)."),
        click.option("--vocabulary", type=int, metavar="TOKENS", help="Frequent tokens that a new draft knows (default: all)."),
    ]
    return gathered(command, options, ShapeFlags, "shape")


@train.command()
@prompt_options
@click.option("--invented", type=int, help="So many prompts that the target invents itself.")
@pair_options
@shape_options
@device_options
@moved_option("--problems", recipe_command("draft"))
def draft(
    target: Path | None,
    draft: Path | None,
    asked: PromptFlags,
    invented: int | None,
    run: RunFlags,
    device: DeviceFlags,
    compiled: bool,
    shape: ShapeFlags,
    **recipe: Any,
) -> None:
    """Train a draft for a target, on the target's own greedy answers to prompts: a new one, or one that is continued."""
    from pipedec.train.draft.training import DraftRecipe, train_draft
    from pipedec.train.invented import invented_set
    from pipedec.transport.replicas import replicas

    if invented is None or asked.prompts:
        asked.check(f", --invented COUNT (the shipped draft: {recipe_command('draft')})")
    chosen = DraftRecipe(**given(recipe))
    target, start = chosen_start(target, draft, given(vars(shape)))
    prompter = prompter_of(target, chosen.long_length)
    prompts = asked.read(prompter, chosen.new_tokens) if asked.prompts else {}
    with replicas(device.chosen()["device"].type) as together:
        where = run.run(**device.chosen(), replicas=together)
        if invented is not None:
            prompts |= invented_set(target, prompter, invented, chosen.new_tokens, where, chosen.seed)
        report = train_draft(target, start, prompts, chosen.with_long_sets(prompts), where, compiled=compiled)
    if report:
        print_draft(report)


def chosen_start(target: Path | None, draft: Path | None, shape: dict[str, Any]) -> tuple[Path, Path | DraftShape]:
    """The target, and the draft to continue or the size of a new one. Raises UserError if they do not fit each other."""

    from pipedec.train.draft.fresh import DraftShape

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
    from pipedec.model import ModelConfig
    from pipedec.text.prompt import Prompter

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
    from pipedec.train.draft.measuring import DEPTHS

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
    from pipedec.train.cards.cells import top_k_cells

    return [*(f"{row[key]:.3f}" if key in row else "" for key in ("target_loss", "draft_loss")), *top_k_cells(row)]


def bita_options(command: Command) -> Command:
    """Adds what ``train bita`` needs besides the prompts; the command gets what decides the result as keywords."""
    return options_of(
        click.option("--target", type=PATH, help="Target checkpoint directory (default: the shipped pair's)."),
        prompt_options,
        run_options,
        click.option("--masks", type=int, help="Masks in a group (default: 3)."),
        click.option("--prompt-tokens", type=int, help="Tokens of the learned prompt (default: 16; 0 with --prompting none)."),
        click.option(
            "--prompting", help="deep (keys and values of each layer), shallow (input embeddings) or none (default: deep)."
        ),
        click.option("--groups", type=int, help="Maximum number of groups of masks in a sample (default: 24)."),
        click.option("--steps", type=int, help="Training steps (default: 2000)."),
        click.option("--batch", type=int, help="Samples in a step (default: 4)."),
        click.option("--learning-rate", type=float, help="Peak learning rate (default: 0.2; the paper's: 0.03)."),
        click.option("--start-std", type=float, help="Standard deviation of initial values (default: 0.5; the paper's: 0.02)."),
        click.option("--new-tokens", type=int, help="Maximum number of tokens of an answer (default: 96)."),
        click.option("--seed", type=int, help="Seed of initial values, sample order and mask positions (default: 0)."),
        device_options,
    )(command)


@train.command()
@bita_options
@moved_option("--library", recipe_command("bita"), is_flag=True)
@moved_option("--problems", recipe_command("bita"))
def bita(target: Path | None, asked: PromptFlags, run: RunFlags, device: DeviceFlags, **recipe: Any) -> None:
    """Train BiTA for a frozen target: masks and a prompt that predict tokens ahead, learned from its own greedy answers."""
    asked.check()
    learn_bita(target, lambda path, chosen: asked.read(prompter_of(path), chosen.new_tokens), run.run(**device.chosen()), recipe)


def learn_bita(
    target: Path | None,
    prompts_of: Callable[[Path, BitaRecipe], dict[str, SplitPrompts]],
    run: Run,
    options: dict[str, Any],
) -> None:
    """Train BiTA on the prompts that ``prompts_of`` makes for the target in a directory; print what was measured."""
    from pipedec.shipped import reference_pair
    from pipedec.train.bita.training import BitaRecipe, train_bita
    from pipedec.train.cards.cells import bita_cells

    chosen = given(options)
    if chosen.get("prompting") == "none":
        chosen.setdefault("prompt_tokens", 0)
    recipe = BitaRecipe(**chosen)
    target = target or reference_pair() / "target"
    report = train_bita(target, prompts_of(target, recipe), recipe, run)
    print_table(
        "Held-out prompts: predictions of each mask, tokens per pass",
        ("prompts", "top 1", "top 5", "loss", "chain", "tree", "groups"),
        [(name, *bita_cells(row)) for name, row in report["held_out"].items()],
    )


for command in (apar, pasta_sft, pasta_bonbon, annotate):
    train.add_command(command)
