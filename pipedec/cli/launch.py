"""``pipedec launch``: a resident cluster on the hosts of a cluster.yaml."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import click
from msgspec import Meta

from pipedec.cli.cluster import Detach, LockFd, detach_cluster, serve_cluster
from pipedec.cli.options import RunName
from pipedec.cli.show import console
from pipedec.cluster.launched import LaunchedCluster
from pipedec.cluster.state import DEFAULT_RUN, MachineLock
from pipedec.config import given_settings, load_cluster, state_directory
from pipedec.core import PipedecError, UserError
from pipedec.flags import Help, own_options
from pipedec.plan.partition import plan
from pipedec.topology import rank_name

_SECRET_WORDS = ("PASSWORD", "SECRET", "TOKEN", "KEY", "CREDENTIAL")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@own_options
@given_settings
def launch(
    given: dict[str, Any],
    file: Path,
    partition: Annotated[str | None, Help("Partition to start (default: the one that the file names).", "NAME")] = None,
    run: RunName = None,
    dry_run: Annotated[bool, Help("Print what would be started where, and start nothing.")] = False,
    detach: Detach = False,
    spares: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Help("Spare devices for ranks whose hosts are lost (default: all spares: of the file)."),
    ] = None,
    lock_fd: LockFd = None,
) -> None:
    """Start the cluster of a cluster.yaml on its hosts, over ssh, and a Redis unless the file names one.

    FILE says which rank runs on which device of which host. Every host needs pipedec, and its part of the checkpoints at the same
    paths (`pipedec distribute`); ssh must reach it without asking for a password (your ssh configuration applies). A host called
    localhost is this machine, and needs no ssh. The cluster loads its weights once and serves `pipedec submit` until
    `pipedec down` or Ctrl-C. Options take precedence over the keys of the file. Every host replaces ranks that are lost, and
    goes on if this command is killed; spares take over those of a host that is gone.
    """
    config = load_cluster(file)
    log = state_directory() / "hosts.log"
    run_id = run or (DEFAULT_RUN if config.redis.url else None)
    cluster = LaunchedCluster(config, partition, run_id, log, spares, given)
    if dry_run:
        for line in planned_start(cluster):
            click.echo(line)
        return
    lock = MachineLock(lock_fd)
    try:
        if detach:
            detach_cluster(lock)
        else:
            _serve(cluster, log)
    finally:
        lock.release()


def _serve(cluster: LaunchedCluster, log: Path) -> None:
    hosts = ", ".join(cluster.nodes.hosts)
    console.print(f"Starting {len(cluster.places)} ranks on {hosts}; what they print goes to {log}.", soft_wrap=True)
    bars = {f"{rank_name(rank)} on {place.host}": [rank] for rank, place in enumerate(cluster.places)}
    try:
        serve_cluster(cluster, bars)
    except PipedecError:
        if "Traceback" in log.read_text():
            console.print(f"See {log} for what the hosts have printed.", soft_wrap=True)
        raise


def planned_start(cluster: LaunchedCluster) -> list[str]:
    """The processes that would be started, line by line, without secrets."""
    lines = [f"Partition {cluster.partition}: {len(cluster.places)} ranks, run {cluster.run_id}"]
    layers = _layers_of(cluster)
    for host in cluster.nodes.hosts:
        lines += ["", f"{host}: {shlex.join(cluster.nodes.command(host))}"]
        for rank in cluster.nodes.ranks_on(host):
            place = cluster.places[rank]
            lines.append(f"  {rank_name(rank)} on {place.device} #{place.index}{layers[rank]}")
        lines += [f"  a spare on {place.device} #{place.index}" for place in cluster.spares if place.host == host]
        lines += [f"  {name}={_shown(name, value)}" for name, value in cluster.nodes.environment(host).items()]
    return [*lines, "", _redis_line(cluster)]


def _layers_of(cluster: LaunchedCluster) -> list[str]:
    """The layers of each rank, as the end of a line; nothing where the target's configuration is not on this machine."""
    try:
        stages = plan(cluster.config).stages
    except UserError:
        return [""] * len(cluster.places)
    return ["", *(f", layers {stage.layers.start}-{stage.layers.stop - 1}" for stage in stages)]


def _redis_line(cluster: LaunchedCluster) -> str:
    server = cluster.config.redis
    if cluster.redis_host is None:
        return f"Redis: {server.url}" + (" with a password" if server.password else "")
    port = f"port {server.port}" if server.port else "a free port"
    password = "the configured" if server.password else "a random"
    return f"Redis: to be started on {cluster.redis_host}, {port}, {password} password"


def _shown(name: str, value: str) -> str:
    return "***" if any(word in name.upper() for word in _SECRET_WORDS) else shlex.quote(value)
