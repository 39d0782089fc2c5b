"""``pipedec submit``: send one request to a running cluster, from any machine that can connect to its Redis."""

from __future__ import annotations

import click

from pipedec.cli.options import RequestFlags, cluster_options, request_options
from pipedec.cli.show import ask_and_show
from pipedec.client.client import Client
from pipedec.cluster.state import find_run


@click.command()
@cluster_options
@request_options
def submit(redis: str | None, run: str | None, asked: RequestFlags) -> None:
    """Send a prompt to a running cluster and stream the answer. Ctrl-C cancels the request; the cluster keeps running."""
    request = asked.request()
    scheduler = find_run(redis, run).connect()
    ask_and_show(Client(scheduler), request, asked.json, asked.trace)
