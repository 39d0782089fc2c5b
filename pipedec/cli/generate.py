"""``pipedec generate``: answer one prompt with a cluster that is started for it and stopped after it."""

from __future__ import annotations

from dataclasses import replace

import click

from pipedec.cli.options import PipelineFlags, RequestFlags, pipeline_options, request_options
from pipedec.cli.show import ask_and_show, loading_bars
from pipedec.client.client import Client
from pipedec.core import DEFAULT_METHOD
from pipedec.methods import find_method


@click.command()
@pipeline_options
@request_options
def generate(pipeline: PipelineFlags, asked: RequestFlags) -> None:
    """Answer one prompt with a temporary cluster on this machine.

    Starts a Redis server, rank 0 and one process per stage, streams the answer, and stops them. The draft model is loaded if the
    method can use one.
    """
    request = asked.request()
    from pipedec.cli.cluster import local_cluster
    from pipedec.cluster.processes import start_fork_server

    start_fork_server()  # it imports torch while this process does
    if request.threads is not None:
        pipeline = pipeline.for_threads()
    method = find_method(request.method or DEFAULT_METHOD)
    cluster = local_cluster(replace(pipeline, draft="none") if method.draft == "none" else pipeline)
    method.check_needs(cluster.spec.draft is not None, cluster.spec.bita is not None)
    try:
        with loading_bars({f"{len(cluster.topology.ranks)} ranks": cluster.topology.ranks}) as progress:
            cluster.start(progress)
        assert cluster.scheduler is not None
        ask_and_show(Client(cluster.scheduler, cluster.check), request, asked.json, asked.trace)
    except BaseException:
        cluster.kill()
        raise
    cluster.stop()
