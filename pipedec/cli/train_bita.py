"""``pipedec train bita``: masks and a prompt that predict tokens ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipedec.bench.options import Target
from pipedec.cli.options import Command
from pipedec.cli.train_draft import prompter_of
from pipedec.cli.train_options import PromptFlags, moved_option, print_table, recipe_command
from pipedec.cli.train_run import DeviceFlags, PartialRun, device_options, run_options
from pipedec.flags import given_values, option_fields, options_of, own_options, with_options
from pipedec.shipped import reference_pair
from pipedec.train.bita.training import BitaRecipe, train_bita
from pipedec.train.cards.cells import bita_cells
from pipedec.train.prompts import SplitPrompts
from pipedec.train.run import Run


def _recipe_options(command: Command) -> Command:
    """Add what decides the result; without a prompt its tokens are 0, unless they are given."""

    def gather(values: dict[str, Any]) -> dict[str, Any]:
        if values["prompting"] == "none" and "prompt_tokens" not in given_values(values):
            values["prompt_tokens"] = 0
        return {"recipe": BitaRecipe(**values)}

    return with_options(command, option_fields(BitaRecipe), gather)


def bita_options(command: Command) -> Command:
    """Add what training BiTA needs; the command gets ``asked``, ``run``, ``recipe`` and ``device``."""
    return options_of(PromptFlags, "asked")(run_options(_recipe_options(device_options(command))))


@click.command()
@bita_options
@moved_option("--library", recipe_command("bita"), is_flag=True)
@moved_option("--problems", recipe_command("bita"))
@own_options
def bita(asked: PromptFlags, run: PartialRun, recipe: BitaRecipe, device: DeviceFlags, target: Target = None) -> None:
    """Train BiTA for a frozen target: masks and a prompt that predict tokens ahead, learned from its own greedy answers."""
    asked.check()
    learn_bita(target, lambda path: asked.read(prompter_of(path), recipe.new_tokens), run(**device.chosen()), recipe)


def learn_bita(target: Path | None, prompts_of: Callable[[Path], dict[str, SplitPrompts]], run: Run, recipe: BitaRecipe) -> None:
    """Train BiTA on the prompts that ``prompts_of`` makes for the target in a directory; print what was measured."""
    target = target or reference_pair() / "target"
    report = train_bita(target, prompts_of(target), recipe, run)
    print_table(
        "Held-out prompts: predictions of each mask, tokens per pass",
        ("prompts", "top 1", "top 5", "loss", "chain", "tree", "groups"),
        [(name, *bita_cells(row)) for name, row in report["held_out"].items()],
    )
