"""``pipedec bench plot``: the paper's figures from the rows of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from pipedec.bench.report.figures.catalogue import FIGURES, draw_figures
from pipedec.bench.report.frames import read_answers, studies
from pipedec.bench.report.tables import tables
from pipedec.cli.show import console
from pipedec.core import UserError
from pipedec.flags import Help, own_options


@click.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@own_options
def plot(
    sources: tuple[Path, ...],
    out: Annotated[Path, Help("Directory of the figures; created if it is missing.", "DIR")],
    only: Annotated[tuple[str, ...], Help("This figure alone; may be repeated.", choices=tuple(FIGURES), repeated=True)] = (),
    title: Annotated[str | None, Help("Text above each figure.", "TEXT")] = None,
    with_tables: Annotated[bool, Help("Also print Markdown tables and write them to tables.md.", flag="--tables")] = False,
) -> None:
    """Draw the results of `pipedec bench sweep` in DIR (or a rows file; the rows of several are joined), as PNG and SVG.

    Measured and computed times are never mixed: rows of both give one figure of each.
    """
    answers = studies(read_answers(sources))
    _make_directory(out)
    if with_tables:
        document = tables(answers)
        _write(out / "tables.md", document)
        print(document, end="")
    drawn = draw_figures(answers, out, only or tuple(FIGURES), title)
    for file in drawn.files:
        _report(str(file))
    if not drawn.files and not with_tables:
        raise UserError(f"nothing to draw: {'; '.join(drawn.left_out)}")
    if drawn.left_out:
        _report(f"left out: {'; '.join(drawn.left_out)}")


def _make_directory(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot create this directory: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    _report(str(path))


def _report(line: str) -> None:
    """Print one line as it is: not wrapped, brackets in names kept."""
    console.print(line, markup=False, soft_wrap=True)
