"""``python -m soak.faults``: random faults under load, against undisturbed answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import click
from rich.console import Console
from rich.table import Table

from pipedec.bench.record import ROWS_FILE, Row
from pipedec.config import Settings, settings_options
from pipedec.core.errors import PipedecError, UserError
from pipedec.engine.build import resolve
from pipedec.flags import Help, given_values, own_options, partial_of, run_command
from soak.faults.run import FaultsConfig, faults_found, grown, run_faults, summarised

_SHOWN_PROBLEMS = 10


@click.command()
@settings_options
@partial_of(FaultsConfig, "measured")
@own_options
def faults(
    settings: Settings,
    measured: partial[FaultsConfig],
    out: Annotated[Path, Help("Directory of the results; an interrupted run is resumed.", "DIR")],
) -> None:
    """Kill, stop and cut off parts of a cluster under load, and compare every answer with that of an undisturbed cluster.

    Appends a row for each fault to OUT/rows.jsonl. Fails if an answer differs or never comes, if more was lost than was hit, or
    if something grows from fault to fault.
    """
    given = given_values(measured.keywords)
    config = measured(count=None) if "hours" in given and "count" not in given else measured()
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: not a directory")
    out.mkdir(parents=True, exist_ok=True)
    spec = resolve(settings.for_threads() if "threads" in config.answers else settings)
    rows = run_faults(config, spec, out, on_news=partial(click.echo, err=True))
    _print(rows)
    if found := faults_found(rows):
        for line in found[:_SHOWN_PROBLEMS]:
            click.echo(line, err=True)
        raise PipedecError(f"{len(found)} problems in {len(rows)} faults: see {out / ROWS_FILE} and {out / 'cluster.log'}")


def _print(rows: Sequence[Row]) -> None:
    output = Console(width=None if Console().is_terminal else 150)
    table = Table(title="Faults: seconds as median, p95, max", title_justify="left")
    table.add_column("kind")
    for name in ("faults", "answers", "noticed", "served again", "next token", "problems"):
        table.add_column(name, justify="right")
    for line in summarised(rows):
        table.add_row(*line)
    output.print(table)
    growth = grown(rows)
    text = ", ".join(f"{name} {'-' if value is None else f'{value:+.2f}'}" for name, value in growth.items())
    output.print(f"Growth per fault: {text}", highlight=False)


if __name__ == "__main__":
    run_command(faults)
