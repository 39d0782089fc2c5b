"""``pipedec node``: what ``pipedec launch`` starts on every host."""

from __future__ import annotations

import click

from pipedec.cluster.node import main


@click.command()
def node() -> None:
    """Start, watch and replace the ranks of this host, as `pipedec launch` orders on standard input, in JSON.

    Once the cluster is up it needs the launcher no longer, and ends with the run. You need not call it yourself.
    """
    main()
