"""``pipedec submit``: send requests to a running cluster, from any machine that can connect to its Redis."""

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
    """Send prompts to a running cluster and stream the answers. Ctrl-C cancels the requests; the cluster keeps running.

    Several prompts are answered together; their answers are printed in the order of the prompts, with --json one line for each.
    """
    requests = asked.requests()
    scheduler = find_run(redis, run).connect()
    ask_and_show(Client(scheduler), requests, asked.json, asked.trace, asked.resumption)
