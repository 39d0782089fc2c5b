"""``pipedec train apar`` and ``pasta-sft``: models that answer in threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from pipedec.cli.options import Command
from pipedec.cli.train_options import Answers, print_table
from pipedec.cli.train_run import DeviceFlags, PartialRun, device_options, threads_run_options
from pipedec.core import UserError
from pipedec.data.prompts import PromptSource
from pipedec.flags import Help, options_of
from pipedec.shipped import reference_pair
from pipedec.train.cards.cells import answer_cells, change_cells, loss_cells
from pipedec.train.threads.learning import ThreadRecipe
from pipedec.train.threads.tuning import tune

DIALECTS = ("apar", "pasta")
ANSWER_COLUMNS = ("", "answers", "forked", "threads", "tokens", "chain", "parallelism", "speed-up", "finished", "circles")


@dataclass(frozen=True)
class ModelFlags:
    """What is tuned, on which files."""

    files: Answers
    also: Annotated[
        tuple[str, ...], Help("Annotated answers in a second dialect; may be repeated.", "DIALECT=FILE", repeated=True)
    ] = ()
    target: Annotated[Path | None, Help("Checkpoint directory to start from (default: the pair's target).", "DIR")] = None
    teacher: Annotated[Path | None, Help("Tuned model to distil from, for drafts.", "DIR")] = None
    prompts: Annotated[
        tuple[str, ...],
        Help(
            "Prompts without answers: for circle rounds, and for the teacher to answer (default: circle rounds have those of "
            "--in); may be repeated.",
            "[NAME=]FILE[#KEY=VALUE]",
            repeated=True,
        ),
    ] = ()

    def by_dialect(self, dialect: str) -> dict[str, tuple[Path, ...]]:
        """Annotated answers, by dialect. Raises UserError if ``--also`` names no dialect or no file."""
        found = {dialect: self.files}
        for entry in self.also:
            name, is_given, path = entry.partition("=")
            if name not in DIALECTS or not is_given or not path:
                raise UserError(f"--also {entry}: give DIALECT=FILE, where DIALECT is one of {', '.join(DIALECTS)}")
            found[name] = (*found.get(name, ()), Path(path))
        return found

    def unanswered(self) -> tuple[str, ...]:
        """The prompts of all files of ``--prompts``, each once. Raises UserError if a file is unsound."""
        return tuple(dict.fromkeys(prompt for text in self.prompts for prompt in PromptSource.parse(text).read().prompts))


def _tuning(command: Command) -> Command:
    return options_of(ModelFlags, "models")(threads_run_options(options_of(ThreadRecipe, "recipe")(device_options(command))))


@click.command()
@_tuning
def apar(**options: Any) -> None:
    """Fine-tune a model to answer in APAR's paragraph tree."""
    _tune("apar", **options)


@click.command()
@_tuning
def pasta_sft(**options: Any) -> None:
    """Fine-tune a model to answer in PASTA-LANG (PASTA-SFT)."""
    _tune("pasta", **options)


def _tune(dialect: str, models: ModelFlags, run: PartialRun, recipe: ThreadRecipe, device: DeviceFlags) -> None:
    by_dialect, where = models.by_dialect(dialect), run(**device.chosen())
    target, prompts = models.target or reference_pair() / "target", models.unanswered()
    _print_tuned(tune(target, by_dialect, recipe, where, models.teacher, prompts))


def _print_tuned(report: dict[str, Any]) -> None:
    losses = [(name, *loss_cells(row)) for name, row in report["held_out_loss"].items() if row]
    print_table("Held-out answers", ("", "text loss", "tokens", "control loss", "tokens"), losses)
    if "held_out" in report:
        found = report["held_out"].items()
        rows = [(f"{dialect} {rule}", *answer_cells(row)) for dialect, by_rule in found for rule, row in by_rule.items()]
        print_table("Answers to held-out prompts", ANSWER_COLUMNS, rows)
    else:
        before, found = report["before"], report["agreement"].items()
        lines = ((dialect, rule, row) for dialect, by_rule in found for rule, row in by_rule.items())
        rows = [(f"{dialect} {rule}", *change_cells(before[dialect][rule], row)) for dialect, rule, row in lines]
        print_table("The teacher's answers", ("written", "top 1", "top 4", "top 16", "tokens"), rows)
