"""``python -m benchmarks.reports``: the papers' figures and tables from the rows of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click

from benchmarks.reports import figures
from benchmarks.reports.tables import tables
from pipedec.bench.report.figures import FIGURES as SWEEP_FIGURES
from pipedec.bench.report.figures import Draw, of_greedy, of_methods
from pipedec.cli.benchmarks.plot import OutDirectory, Title, answers_of, draw_all, sources_argument
from pipedec.flags import Help, own_options, run_command

FIGURES: dict[str, Draw] = {
    **SWEEP_FIGURES,
    "accuracy": of_methods(of_greedy(figures.accuracy_figure)),
    "stochastic": of_methods(figures.stochastic_figure),
    "tree": of_greedy(figures.tree_figure),
    "misses": of_greedy(figures.misses_figure),
    "prompt-tokens": of_greedy(figures.prompt_tokens_figure),
    "mask-tokens": of_greedy(figures.masks_figure),
}
_NAMES = tuple(FIGURES)
FigureName = Literal[_NAMES]  # type: ignore[valid-type]


@click.command()
@sources_argument
@own_options
def reports(
    sources: tuple[Path, ...],
    out: OutDirectory,
    only: Annotated[tuple[FigureName, ...], Help("This figure alone; may be repeated.", repeated=True)] = (),
    title: Title = None,
    with_tables: Annotated[bool, Help("Also print Markdown tables and write them to tables.md.", flag="--tables")] = False,
) -> None:
    """Draw the results of `pipedec bench sweep` in DIR as all figures of the papers, those of `pipedec bench plot` among them.

    Measured and computed times are never mixed: rows of both give one figure of each.
    """
    answers = answers_of(sources, out)
    if with_tables:
        document = tables(answers)
        (out / "tables.md").write_text(document, encoding="utf-8")
        click.echo(out / "tables.md", err=True)
        print(document, end="")
    chosen = {name: draw for name, draw in FIGURES.items() if not only or name in only}
    draw_all(answers, out, chosen, title, may_be_none=with_tables)


if __name__ == "__main__":
    run_command(reports)
