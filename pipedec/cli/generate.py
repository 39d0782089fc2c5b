"""``pipedec generate``: a cluster for one answer."""

from __future__ import annotations

import click

from pipedec.cli.options import PipelineFlags, RequestFlags, pipeline_options, request_options
from pipedec.cli.show import ask_and_show, loading_bar
from pipedec.core import UserError
from pipedec.engine.client import Client


@click.command()
@pipeline_options
@request_options
def generate(pipeline: PipelineFlags, asked: RequestFlags) -> None:
    """Answer one prompt with a cluster of its own on this machine.

    Starts a Redis, a draft rank and one rank per stage, streams the answer, and stops everything again.
    """
    request = asked.request()
    from pipedec.cli.cluster import local_cluster

    cluster = local_cluster(pipeline)
    if request.method not in (None, "pp") and cluster.spec.draft is None:
        raise UserError(f"method {request.method} needs a draft model: give --draft DIR, or use --method pp")
    try:
        with loading_bar(cluster.spec.num_stages + 1) as progress:
            cluster.start(progress)
        assert cluster.scheduler is not None
        ask_and_show(Client(cluster.scheduler, cluster.check), request, asked.json, asked.trace)
    except BaseException:
        cluster.kill()
        raise
    cluster.stop()
