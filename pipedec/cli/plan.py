"""``pipedec plan``: the layers, memory and expected times of a cluster.yaml, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
from rich.console import Console

from pipedec.config import load_cluster
from pipedec.core import PipedecError
from pipedec.flags import Help, own_options
from pipedec.plan.files import host_parts, needed_files
from pipedec.plan.partition import plan as make_plan
from pipedec.plan.placement import spare_places
from pipedec.plan.table import files_table, plan_table


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@own_options
def plan(
    file: Path,
    partition: Annotated[str | None, Help("Partition to plan (default: the default of the file).", "NAME")] = None,
    files: Annotated[bool, Help("Print the files of the checkpoints that each host needs instead.")] = False,
) -> None:
    """Print the layers, memory and expected time of every rank, and the expected time per token.

    FILE is a cluster.yaml. Nothing is started. Exits with status 1 if the model does not fit into the devices' memory.
    """
    page = Console(width=100 if not Console().is_terminal else None)
    if files:
        config = load_cluster(file).for_partition(partition)
        parts = host_parts(config, spare_places(config))
        page.print(files_table(parts.keys(), needed_files(parts)))
        return
    made = make_plan(load_cluster(file), partition)
    page.print(plan_table(made))
    if made.problems:
        raise PipedecError("it does not fit: " + "; ".join(made.problems))
