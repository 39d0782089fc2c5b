"""``pipedec plan``: the layers, memory and expected times of a cluster.yaml, before anything is started."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from pipedec.config import load_cluster
from pipedec.core import PipedecError


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@click.option("--partition", help="Partition to plan (default: the one that the file names as its default).")
def plan(file: Path, partition: str | None) -> None:
    """Print the layers, memory and expected time of every rank, and the expected time per token.

    FILE is a cluster.yaml. Nothing is started. Exits with status 1 if the model does not fit into the devices' memory.
    """
    from pipedec.plan.partition import plan as make_plan
    from pipedec.plan.table import plan_table

    made = make_plan(load_cluster(file), partition)
    Console(width=100 if not Console().is_terminal else None).print(plan_table(made))
    if made.problems:
        raise PipedecError("it does not fit: " + "; ".join(made.problems))
