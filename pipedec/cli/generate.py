"""``pipedec generate``: answer one prompt with a cluster that is started for it and stopped after it."""

from __future__ import annotations

from dataclasses import replace

import click

from pipedec.cli.options import NEED_DRAFT, PipelineFlags, RequestFlags, pipeline_options, request_options
from pipedec.cli.show import ask_and_show, loading_bar
from pipedec.client.client import Client
from pipedec.core import UserError

_WITHOUT_DRAFT = ("pp", "bita")


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

    if request.threads is not None:
        pipeline = pipeline.for_threads()
    cluster = local_cluster(replace(pipeline, draft="none") if request.method in _WITHOUT_DRAFT else pipeline)
    if request.method in NEED_DRAFT and cluster.spec.draft is None:
        raise UserError(f"method {request.method} needs a draft model: give --draft DIR, or use --method pp")
    if request.method == "bita" and cluster.spec.bita is None:
        raise UserError("method bita needs what pipedec train bita has learned for this target: give --bita DIR")
    try:
        with loading_bar(cluster.spec.num_stages + 1) as progress:
            cluster.start(progress)
        assert cluster.scheduler is not None
        ask_and_show(Client(cluster.scheduler, cluster.check), request, asked.json, asked.trace)
    except BaseException:
        cluster.kill()
        raise
    cluster.stop()
