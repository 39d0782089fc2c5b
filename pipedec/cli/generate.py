"""``pipedec generate``: answer prompts with a cluster that is started for it and stopped after it."""

from __future__ import annotations

import click

from pipedec.cli.options import RequestFlags, request_options
from pipedec.cli.show import ask_and_show, loading_bars
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster, resolve_apart
from pipedec.config import NONE, Settings, settings_options
from pipedec.core import DEFAULT_METHOD
from pipedec.methods import find_method


@click.command()
@settings_options
@request_options
def generate(settings: Settings, asked: RequestFlags) -> None:
    """Answer prompts with a temporary cluster on this machine.

    Starts a Redis server, rank 0 and one process per stage, streams the answers, and stops them. The draft model is loaded if the
    method can use one. Several prompts are answered together; their answers are printed in the order of the prompts.
    """
    requests = asked.requests()
    method = find_method(asked.method or DEFAULT_METHOD)
    if asked.threads is not None:
        settings = settings.for_threads()
    if method.draft == "none":
        settings = settings.replaced(draft=NONE)
    cluster = LocalCluster(resolve_apart(settings))
    method.check_needs(cluster.spec.draft is not None, cluster.spec.bita is not None)
    try:
        with loading_bars({f"{len(cluster.topology.ranks)} ranks": cluster.topology.ranks}) as progress:
            cluster.start(progress)
        assert cluster.scheduler is not None
        ask_and_show(Client(cluster.scheduler, cluster.check), requests, asked.json, asked.trace, asked.resumption)
    except BaseException:
        cluster.kill()
        raise
    cluster.stop()
