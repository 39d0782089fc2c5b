"""``pipedec bench faults``: random faults under load, against undisturbed answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.bench.faults.benchmark import FaultsConfig, bench_faults, faults_found, grown
from pipedec.bench.faults.figures import faults_figure
from pipedec.bench.faults.summary import summarised
from pipedec.bench.load.figures import draw
from pipedec.bench.record import ROWS_FILE
from pipedec.cli.benchmarks.shared import OutDirectory
from pipedec.cli.benchmarks.sweep import ProgressBar
from pipedec.cli.show import console
from pipedec.config import Settings, settings_options
from pipedec.core import PipedecError, UserError
from pipedec.engine.build import resolve
from pipedec.flags import given_values, own_options, partial_of

_SHOWN_PROBLEMS = 10


@click.command()
@settings_options
@partial_of(FaultsConfig, "measured")
@own_options
def faults(settings: Settings, measured: partial[FaultsConfig], out: OutDirectory) -> None:
    """Kill, stop and cut off parts of a cluster under load, and compare every answer with that of an undisturbed cluster.

    Appends a row for each fault to OUT/rows.jsonl and draws OUT/faults: how long until a fault was noticed and until the next
    token, and memory, keys, descriptors and threads over time. Fails if an answer differs or never comes, if more was lost than
    was hit, or if something grows from fault to fault.
    """
    given = given_values(measured.keywords)
    config = measured(count=None) if "hours" in given and "count" not in given else measured()
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: not a directory")
    out.mkdir(parents=True, exist_ok=True)
    spec = resolve(settings.for_threads() if "threads" in config.answers else settings)
    with ProgressBar() as bar:
        rows = bench_faults(config, spec, out, bar)
    _print(rows)
    for file in (out / ROWS_FILE, *draw({"faults": faults_figure(rows)}, out)):
        console.print(str(file), markup=False, soft_wrap=True)
    if found := faults_found(rows):
        for line in found[:_SHOWN_PROBLEMS]:
            console.print(line, markup=False, soft_wrap=True)
        raise PipedecError(f"{len(found)} problems in {len(rows)} faults: see {out / ROWS_FILE} and {out / 'cluster.log'}")


def _print(rows: Sequence[dict[str, Any]]) -> None:
    output = Console(width=None if Console().is_terminal else 150)
    table = Table(title="Faults: seconds as median, p95, max", title_justify="left")
    table.add_column("kind")
    for name in ("faults", "answers", "noticed", "served again", "next token", "problems"):
        table.add_column(name, justify="right")
    for line in summarised(rows):
        table.add_row(
            line.kind, str(line.faults), str(line.answers), _spread(line.noticed), _spread(line.served), _spread(line.waits),
            str(line.problems),
        )  # fmt: skip
    output.print(table)
    growth = grown(rows)
    text = ", ".join(f"{name} {'-' if value is None else f'{value:+.2f}'}" for name, value in growth.items())
    output.print(f"Growth per fault: {text}", highlight=False)


def _spread(figures: Iterable[float] | None) -> str:
    return "-" if figures is None else ", ".join(f"{value:.2f}" for value in figures)
