"""``pipedec train apar``, ``pasta-sft`` and ``pasta-bonbon``: targets that answer in threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipedec.core import UserError


def _tuning_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option("--in", "files", type=click.Path(path_type=Path), multiple=True, required=True, help="Annotated answers (JSONL); repeatable."),
        click.option("--also", multiple=True, metavar="DIALECT=FILE", help="Annotated answers in another dialect, for the same model."),
        click.option("--out", type=click.Path(path_type=Path), required=True, help="Where the model, training.json and README.md are written."),
        click.option("--work", type=click.Path(path_type=Path), required=True, help="Checkpoint and log; a second run continues from them."),
        click.option("--target", type=click.Path(path_type=Path), help="Checkpoint directory to start from (default: the pair's target)."),
        click.option("--steps", type=int, help="Training steps (default: 400)."),
        click.option("--batch-tokens", type=int, help="Tokens of a step (default: 4096)."),
        click.option("--learning-rate", type=float, help="The highest (default: 0.002)."),
        click.option("--seed", type=int, help="Order of samples, which are answered in one thread (default: 0)."),
        click.option("--form", help="tree: threads beside each other, by a mask; unrolled: a row for each (default: tree)."),
        click.option("--plain-share", type=float, help="Share of answers in one thread, without marker (default: 0.15)."),
        click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="What forwards compute in."),
        click.option("--threads", type=int, default=2, show_default=True, help="CPU threads."),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to train."),
    ]  # fmt: skip
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
    out: Path,
    work: Path,
    target: Path | None,
    dtype: str,
    threads: int,
    device: str,
    **wishes: Any,
) -> None:
    from pipedec.engine.spec import REFERENCE_PAIR, chosen_device
    from pipedec.train.thread_trainer import ThreadRecipe
    from pipedec.train.thread_tuning import tune

    by_dialect = {dialect: files}
    for entry in also:
        name, _, path = entry.partition("=")
        by_dialect[name] = (*by_dialect.get(name, ()), Path(path))
    recipe = ThreadRecipe(**{name: value for name, value in wishes.items() if value is not None})
    tune(target or REFERENCE_PAIR / "target", by_dialect, out, work, recipe, dtype, threads, chosen_device(device))
