"""``pipedec plan``: what a cluster.yaml would do, before anything is started."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from pipedec.config import load_cluster
from pipedec.core import PipedecError


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@click.option("--partition", help="Which partition of the file (default: the file's own default).")
def plan(file: Path, partition: str | None) -> None:
    """Print the partition, the memory of every GPU and the expected timestep; exit 1 if it does not fit."""
    from pipedec.plan.partition import plan as make_plan
    from pipedec.plan.table import plan_table

    made = make_plan(load_cluster(file), partition)
    Console(width=100 if not Console().is_terminal else None).print(plan_table(made))
    if made.problems:
        raise PipedecError("it does not fit: " + "; ".join(made.problems))
