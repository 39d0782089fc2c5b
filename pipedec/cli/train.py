"""``pipedec train``: the models the project ships."""

from __future__ import annotations

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
    from dataclasses import replace

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
    table = Table(title="Held-out text", title_justify="left")
    for column in ("text", "target loss", "draft loss", "top 1", "top 4", "top 16"):
        table.add_column(column, justify="right" if column != "text" else "left")
    for family, row in report["held_out"].items():
        agreement = (f"{row[key]:.1%}" for key in ("top1", "top4", "top16"))
        table.add_row(family, f"{row['target_loss']:.3f}", f"{row['draft_loss']:.3f}", *agreement)
    Console().print(table)
