"""``pipedec train apar``, ``pasta-sft`` and ``pasta-bonbon``: targets that answer in threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.core import UserError

DIALECTS = ("apar", "pasta")


def _tuning_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option(
            "--in",
            "files",
            type=click.Path(path_type=Path),
            multiple=True,
            required=True,
            help="Annotated answers (JSONL); repeatable.",
        ),
        click.option(
            "--also", multiple=True, metavar="DIALECT=FILE", help="Annotated answers in another dialect, for the same model."
        ),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            required=True,
            help="Where the model, training.json and README.md are written.",
        ),
        click.option(
            "--work", type=click.Path(path_type=Path), required=True, help="Checkpoint and log; a second run continues from them."
        ),
        click.option(
            "--target", type=click.Path(path_type=Path), help="Checkpoint directory to start from (default: the pair's target)."
        ),
        click.option("--teacher", type=click.Path(path_type=Path), help="Tuned model whose next tokens are learned: for drafts."),
        click.option("--steps", type=int, help="Training steps (default: 400)."),
        click.option("--batch-tokens", type=int, help="Tokens of a step (default: 4096)."),
        click.option("--learning-rate", type=float, help="The highest (default: 0.002)."),
        click.option("--seed", type=int, help="Order of samples, which are answered in one thread (default: 0)."),
        click.option("--form", help="tree: threads beside each other, by a mask; unrolled: a row for each (default: tree)."),
        click.option("--plain-share", type=float, help="Share of answers in one thread, without marker (default: 0.15)."),
        click.option("--max-length", type=int, help="Longer answers with their prompts are left out (default: 512 tokens)."),
        click.option("--held-out-prompts", type=int, default=48, show_default=True, help="Answered of each kind, to measure."),
        click.option(
            "--dtype",
            type=click.Choice(["float32", "bfloat16"]),
            default="float32",
            show_default=True,
            help="What forwards compute in.",
        ),
        click.option("--threads", type=int, default=2, show_default=True, help="CPU threads."),
        click.option(
            "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to train."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_tuning_options
def apar(**wishes: Any) -> None:
    """Fine-tune a model to answer in APAR's paragraph tree."""
    _tune("apar", **wishes)


@click.command()
@_tuning_options
def pasta_sft(**wishes: Any) -> None:
    """Fine-tune a model to answer in PASTA-LANG (PASTA-SFT)."""
    _tune("pasta", **wishes)


def _tune(
    dialect: str,
    files: tuple[Path, ...],
    also: tuple[str, ...],
    target: Path | None,
    teacher: Path | None,
    out: Path,
    work: Path,
    held_out_prompts: int,
    dtype: str,
    threads: int,
    device: str,
    **wishes: Any,
) -> None:
    from pipedec.engine.spec import REFERENCE_PAIR, chosen_device
    from pipedec.train.thread_trainer import ThreadRecipe
    from pipedec.train.thread_tuning import Run, tune

    _at_least_1({"--threads": threads, "--held-out-prompts": held_out_prompts})
    by_dialect = {dialect: files}
    for entry in also:
        name, is_given, path = entry.partition("=")
        if name not in DIALECTS or not is_given or not path:
            raise UserError(f"--also {entry}: give DIALECT=FILE, where DIALECT is one of {', '.join(DIALECTS)}")
        by_dialect[name] = (*by_dialect.get(name, ()), Path(path))
    recipe = ThreadRecipe(**{name: value for name, value in wishes.items() if value is not None})
    run = Run(out, work, dtype, threads, chosen_device(device), held_out_prompts)
    _print_tuned(tune(target or REFERENCE_PAIR / "target", by_dialect, recipe, run, teacher))


def _at_least_1(counts: dict[str, int]) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name} must be at least 1")


def _print_tuned(report: dict[str, Any]) -> None:
    from pipedec.train.thread_card import agreement_cells, answer_cells, loss_cells

    losses = [(name, *loss_cells(row)) for name, row in report["held_out_loss"].items() if row]
    _print_table("Held-out answers", ("", "text loss", "tokens", "control loss", "tokens"), losses)
    if "held_out" in report:
        columns = ("written", "answers", "forked", "threads", "tokens", "chain", "parallelism", "speed-up", "finished")
        found = report["held_out"].items()
        rows = [(f"{dialect} {rule}", *answer_cells(row)) for dialect, by_rule in found for rule, row in by_rule.items()]
        _print_table("Answers to held-out prompts", columns, rows)
    else:
        before, found = report["before"], report["agreement"].items()
        lines = ((dialect, rule, row) for dialect, by_rule in found for rule, row in by_rule.items())
        rows = [(f"{dialect} {rule}", *agreement_cells(before[dialect][rule], row)) for dialect, rule, row in lines]
        _print_table("The teacher's answers", ("written", "top 1", "top 4", "top 16", "tokens"), rows)


def _print_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
