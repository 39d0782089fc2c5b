"""``pipedec bench plot``: the paper's figures from the rows of a sweep."""

from __future__ import annotations

from pathlib import Path

import click

from pipedec.cli.benchmarks.shared import PATH
from pipedec.cli.show import console
from pipedec.core import UserError

# Those of ``bench.report.figures.catalogue``, which needs pandas.
FIGURES = ("latency", "accuracy", "stochastic", "tree", "speedup", "misses", "breakdown", "prompt-tokens", "mask-tokens")


@click.command()
@click.argument("sources", nargs=-1, required=True, type=PATH, metavar="DIR...")
@click.option("--out", type=PATH, required=True, help="Directory of the figures; created if it is missing.")
@click.option("--only", multiple=True, type=click.Choice(FIGURES), help="This figure alone (may be repeated).")
@click.option("--title", help="Text above each figure.")
@click.option("--tables", "with_tables", is_flag=True, help="Also print Markdown tables and write them to tables.md.")
def plot(sources: tuple[Path, ...], out: Path, only: tuple[str, ...], title: str | None, with_tables: bool) -> None:
    """Draw the results of `pipedec bench sweep` in DIR (or a rows file; the rows of several are joined), as PNG and SVG.

    Measured and computed times are never mixed: rows of both give one figure of each.
    """
    from pipedec.bench.report.figures.catalogue import draw_figures
    from pipedec.bench.report.frames import read_answers, studies
    from pipedec.bench.report.tables import tables

    answers = studies(read_answers(sources))
    _make_directory(out)
    if with_tables:
        document = tables(answers)
        _write(out / "tables.md", document)
        print(document, end="")
    drawn = draw_figures(answers, out, only or FIGURES, title)
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
