"""``pipedec bench faults``: random faults under load, against undisturbed answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.cli.benchmarks.shared import PATH, comma_numbers
from pipedec.cli.benchmarks.sweep import ProgressBar
from pipedec.cli.show import console
from pipedec.config import Settings, settings_options
from pipedec.core import DEFAULT_METHOD, PipedecError, UserError
from pipedec.engine.build import resolve

_SHOWN_PROBLEMS = 10


def comma_names(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """Callback of an option whose value is names with commas between them."""
    return None if text is None else tuple(text.split(","))


@click.command()
@settings_options
@click.option("--count", type=int, metavar="N", help="Number of faults (default: 24).")
@click.option("--hours", type=float, metavar="H", help="Or for how long there are faults.")
@click.option(
    "--kinds",
    callback=comma_names,
    metavar="NAME,…",
    help="kill, stop, exit, reset, redis-restart, redis-flush, redis-disconnect, front-end, supervisor (default: all possible).",
)
@click.option(
    "--concurrency",
    default="1,3,8",
    show_default=True,
    callback=comma_numbers,
    metavar="N,…",
    help="Numbers of requests that are asked together.",
)
@click.option(
    "--answers",
    default="greedy,drawn,threads",
    show_default=True,
    callback=comma_names,
    metavar="NAME,…",
    help="Kinds of answers.",
)
@click.option(
    "--methods",
    default=DEFAULT_METHOD,
    show_default=True,
    callback=comma_names,
    metavar="NAME,…",
    help="They take turns.",
)
@click.option("--prompt", "prompts", multiple=True, help="A prompt; may be repeated (default: six).")
@click.option("--max-tokens", type=int, default=160, show_default=True, help="Tokens of an answer; one in threads may end early.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of faults and their moments.")
@click.option("--out", type=PATH, required=True, help="Directory of the results; an interrupted benchmark goes on there.")
def faults(
    settings: Settings, count: int | None, hours: float | None, kinds: tuple[str, ...] | None, prompts: tuple[str, ...],
    answers: tuple[str, ...], out: Path, **others: Any,
) -> None:  # fmt: skip
    """Kill, stop and cut off parts of a cluster under load, and compare every answer with that of an undisturbed cluster.

    Appends a row for each fault to OUT/rows.jsonl and draws OUT/faults: how long until a fault was noticed and until the next
    token, and memory, keys, descriptors and threads over time. Fails if an answer differs or never comes, if more was lost than
    was hit, or if something grows from fault to fault.
    """
    from pipedec.bench.faults.benchmark import FaultsConfig, bench_faults, faults_found
    from pipedec.bench.faults.figures import faults_figure
    from pipedec.bench.load.figures import draw
    from pipedec.bench.record import ROWS_FILE

    given: dict[str, Any] = {name: value for name, value in {"kinds": kinds, "prompts": prompts}.items() if value}
    config = FaultsConfig(count or (None if hours else 24), hours, answers=answers, **given, **others)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: not a directory")
    out.mkdir(parents=True, exist_ok=True)
    spec = resolve(settings.for_threads() if "threads" in answers else settings)
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
    from pipedec.bench.faults.benchmark import grown
    from pipedec.bench.faults.summary import summarised

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
