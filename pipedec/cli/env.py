"""``pipedec env``: what a report of a fault needs about this host."""

from __future__ import annotations

import json

import click

from pipedec.cli.options import Json
from pipedec.cli.show import console as progress
from pipedec.cluster.doctor.environment import environment
from pipedec.flags import own_options


@click.command()
@own_options
def env(as_json: Json = False) -> None:
    """Print what a report of a fault needs: versions, the machine, directories, and variables without their secrets."""
    with progress.status("Examining this host"):
        facts = environment()
    if as_json:
        print(json.dumps(facts))
        return
    width = max(len(name) for rows in facts.values() for name in rows)
    for section, rows in facts.items():
        print(f"{section}:", *(f"  {name:<{width}}  {value}" for name, value in rows.items()), sep="\n")
