"""``pipedec bench plot``: figures from the rows of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import click
import pandas as pd

from pipedec.bench.report.figures import FIGURES, Draw, draw_figures
from pipedec.bench.report.frames import read_answers, studies
from pipedec.cli.benchmarks.shared import make_directory, print_files
from pipedec.cli.main import moved_flags
from pipedec.cli.show import console
from pipedec.core.errors import UserError
from pipedec.flags import Help, own_options

OutDirectory = Annotated[Path, Help("Directory of the figures; created if it is missing.", "DIR")]
Title = Annotated[str | None, Help("Text above each figure.", "TEXT")]
_NAMES = tuple(FIGURES)
FigureName = Literal[_NAMES]  # type: ignore[valid-type]
sources_argument = click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")


@click.command()
@sources_argument
@own_options
@moved_flags({"--tables": False}, "has moved to python -m benchmarks.reports, in a checkout of pipedec")
def plot(
    sources: tuple[Path, ...],
    out: OutDirectory,
    only: Annotated[tuple[FigureName, ...], Help("This figure alone; may be repeated.", repeated=True)] = (),
    title: Title = None,
) -> None:
    """Draw the results of `pipedec bench sweep` in DIR (or a rows file; the rows of several are joined), as PNG and SVG.

    Measured and computed times are never mixed: rows of both give one figure of each.
    """
    draw_all(answers_of(sources, out), out, {name: draw for name, draw in FIGURES.items() if not only or name in only}, title)


def answers_of(sources: tuple[Path, ...], out: Path) -> dict[str, pd.DataFrame]:
    """The answers that may appear in one figure, by timing. Makes ``out``; raises UserError if it cannot, or no file has rows."""
    answers = studies(read_answers(sources))
    make_directory(out)
    return answers


def draw_all(
    answers: Mapping[str, pd.DataFrame], out: Path, figures: Mapping[str, Draw], title: str | None, may_be_none: bool = False
) -> None:
    """Draw what the rows contain, and report it. Raises UserError if that is nothing, unless there ``may_be_none``."""
    drawn = draw_figures(answers, out, figures, title)
    left_out = "; ".join(drawn.left_out)
    print_files(*drawn.files)
    if not drawn.files and not may_be_none:
        raise UserError(f"nothing to draw: {left_out}")
    if left_out:
        console.print(f"left out: {left_out}", markup=False, soft_wrap=True)
