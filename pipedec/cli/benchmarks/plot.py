"""``pipedec bench plot``: the paper's figures from the rows of a sweep."""

from __future__ import annotations

from pathlib import Path

import click

from pipedec.bench.figures import FIGURES
from pipedec.cli.benchmarks.shared import PATH
from pipedec.cli.show import console
from pipedec.core import UserError


@click.command()
@click.argument("sources", nargs=-1, required=True, type=PATH, metavar="DIR...")
@click.option("--out", type=PATH, required=True, help="Directory of the pictures; made if it is missing.")
@click.option("--only", multiple=True, type=click.Choice(list(FIGURES)), help="This picture alone (may be repeated).")
@click.option("--title", help="Text above every picture.")
@click.option("--tables", "with_tables", is_flag=True, help="Print Markdown tables, too, and write them to tables.md.")
def plot(sources: tuple[Path, ...], out: Path, only: tuple[str, ...], title: str | None, with_tables: bool) -> None:
    """Draw what `pipedec bench sweep` wrote to DIR (or a rows file; the rows of several are joined), as PNG and SVG.

    Measured and computed times are never mixed: with both there is one picture of each.
    """
    from pipedec.bench.figure_tables import tables
    from pipedec.bench.figures import draw_figures
    from pipedec.bench.sweep_rows import read_rows, studies

    chosen = studies(read_rows(sources))
    _make_directory(out)
    if with_tables:
        document = tables(chosen)
        _write(out / "tables.md", document)
        print(document, end="")
    drawn = draw_figures(chosen, out, only or tuple(FIGURES), title)
    for file in drawn.files:
        _say(str(file))
    if not drawn.files and not with_tables:
        raise UserError(f"nothing to draw: {'; '.join(drawn.left_out)}")
    if drawn.left_out:
        _say(f"left out: {'; '.join(drawn.left_out)}")


def _make_directory(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot make this directory: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    _say(str(path))


def _say(line: str) -> None:
    """One line as it is: not wrapped, brackets in names kept."""
    console.print(line, markup=False, soft_wrap=True)
