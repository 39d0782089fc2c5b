"""Commands on a cluster.yaml: ``pipedec launch``, ``node`` (which it starts on every host), ``distribute`` and ``plan``."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from msgspec import Meta
from rich.console import Console

from pipedec.checkpoints.download import pinned
from pipedec.cli.cluster import Detach, detach_cluster, serve_cluster
from pipedec.cli.options import RunName, refuse_flags
from pipedec.cli.show import console
from pipedec.cluster.distribution import Folder, folders, send
from pipedec.cluster.launched import LaunchedCluster, for_hosts
from pipedec.cluster.logs import log_directory
from pipedec.cluster.node import main as watch_ranks
from pipedec.cluster.node_link import node_command
from pipedec.cluster.state import DEFAULT_RUN, check_unused
from pipedec.config import ServerConfig, load_cluster
from pipedec.config.environment import shown_value
from pipedec.config.settings import Models, given_settings
from pipedec.core.errors import PipedecError, UserError
from pipedec.flags import Help, own_options
from pipedec.gguf import is_named
from pipedec.hardware import GIGA
from pipedec.hub import HubName
from pipedec.plan.files import checkpoints_of, host_parts, needed_files
from pipedec.plan.one_host import fitting_quantize, gpus_of, one_host_plan
from pipedec.plan.partition import Measured
from pipedec.plan.partition import plan as make_plan
from pipedec.plan.placement import spare_places
from pipedec.plan.table import files_table, plan_table
from pipedec.plan.training import training_table
from pipedec.topology import rank_name

Milliseconds = Annotated[float, Meta(gt=0)] | None


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
) -> None:
    """Start the cluster of a cluster.yaml on its hosts, over ssh, and a Redis unless the file names one.

    FILE says which rank runs on which device of which host. Every host needs pipedec, and its part of the checkpoints at the same
    paths (`pipedec distribute`); ssh must reach it without asking for a password (your ssh configuration applies). A host called
    localhost is this machine, and needs no ssh. The cluster loads its weights once and serves `pipedec submit` until
    `pipedec down` or Ctrl-C. Options take precedence over the keys of the file. Every host replaces ranks that are lost, and
    goes on if this command is killed; spares take over those of a host that is gone.
    """
    config = load_cluster(file)
    run_id = run or (DEFAULT_RUN if config.redis.url else f"launch-{secrets.token_hex(4)}")
    log = log_directory(run_id) / "hosts.log"
    cluster = LaunchedCluster(config, partition, run_id, log, spares, given)
    if dry_run:
        for line in planned_start(cluster):
            click.echo(line)
        return
    check_unused(run_id)
    if detach:
        detach_cluster(run_id)
        return
    try:
        hosts = ", ".join(cluster.nodes.hosts)
        console.print(f"Starting {len(cluster.places)} ranks on {hosts}; what they print goes to {log}.", soft_wrap=True)
        serve_cluster(cluster, {host: ranks for host in cluster.nodes.hosts if (ranks := cluster.nodes.ranks_on(host))})
    except PipedecError:
        if log.is_file() and "Traceback" in log.read_text(errors="replace"):
            console.print(f"See {log} for what the hosts have printed.", soft_wrap=True)
        raise


def planned_start(cluster: LaunchedCluster) -> list[str]:
    """The processes that would be started, line by line, without secrets."""
    lines = [f"Partition {cluster.partition}: {len(cluster.places)} ranks, run {cluster.run_id}"]
    try:
        stages = make_plan(cluster.config).stages
        layers = ["", *(f", layers {stage.layers.start}-{stage.layers.stop - 1}" for stage in stages)]
    except UserError:  # the target's configuration is not on this machine
        layers = [""] * len(cluster.places)
    for host in cluster.nodes.hosts:
        lines += ["", f"{host}: {shlex.join(node_command(cluster.config.server(host), cluster.config.launch))}"]
        for rank in cluster.nodes.ranks_on(host):
            place = cluster.places[rank]
            lines.append(f"  {rank_name(rank)} on {place.device} #{place.index}{layers[rank]}")
        lines += [f"  a spare on {place.device} #{place.index}" for place in cluster.spares if place.host == host]
        for name, value in cluster.nodes.environment(host).items():
            lines.append(f"  {name}={shlex.quote(shown_value(name, value))}")
    server = cluster.config.redis
    if cluster.redis_host is None:
        return [*lines, "", f"Redis: {server.url}" + (" with a password" if server.password else "")]
    port = f"port {server.port}" if server.port else "a free port"
    password = "the configured" if server.password else "a random"
    return [*lines, "", f"Redis: to be started on {cluster.redis_host}, {port}, {password} password"]


@click.command()
def node() -> None:
    """Start, watch and replace the ranks of this host, as `pipedec launch` orders on standard input, in JSON.

    Once the cluster is up it needs the launcher no longer, and ends with the run. You need not call it yourself.
    """
    watch_ranks()


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@own_options
def distribute(
    file: Path,
    partition: Annotated[str | None, Help("Partition to prepare (default: the one that the file names).", "NAME")] = None,
    spares: Annotated[Annotated[int, Meta(ge=0)] | None, Help("As for launch (default: all spares: of the file).")] = None,
    source: Annotated[
        Path | None, Help("Folder in which this machine has the checkpoints, under the same names.", "DIR", flag="--from")
    ] = None,
    checksum: Annotated[bool, Help("Compare every byte of all files; else equal sizes and times are enough.")] = False,
) -> None:
    """Copy to every host what it lacks of the checkpoints, by rsync.

    FILE is a cluster.yaml. A host gets the files that its ranks read, and all of them if it has spares. A copy that was
    interrupted goes on where it stopped; files that are there are left alone. Needs rsync 3.2.3 or newer on this machine and the
    hosts.
    """
    config = for_hosts(load_cluster(file).for_partition(partition))
    models = checkpoints_of(config)
    here = config if source is None else config.for_partition(given={key: _under(source, model) for key, model in models.items()})
    complaints = []
    for host, parts in host_parts(here, spare_places(here, count=spares)).items():
        try:
            sizes = _send(config.server(host), folders(parts, models), checksum)
        except UserError as error:
            complaints.append(str(error))
            continue
        sent = f"{len(sizes)} files, {sum(sizes) / GIGA:.2f} GB" if sizes else "nothing is missing"
        console.print(f"{host}: {sent}", soft_wrap=True)
    for name in filter(None, map(HubName.of, models.values())):
        console.print(f"{name.repo}: every host downloads its part when the cluster starts", soft_wrap=True)
    if complaints:
        raise UserError("; ".join(dict.fromkeys(complaints)))


def _send(server: ServerConfig, wanted: Sequence[Folder], checksum: bool) -> list[int]:
    with console.status(f"{server.host}: comparing") as status:
        return [
            size
            for folder in wanted
            for size in send(server, folder, checksum, lambda line: status.update(f"{server.host}: {line}"))
        ]


def _under(folder: Path, model: str) -> str:
    if is_named(model):
        return model
    found = folder / Path(model).name
    if not found.exists():
        raise UserError(f"{found} does not exist: --from names a folder that holds {found.name}")
    return str(found.absolute())


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"), metavar="[FILE|MODEL]")
@own_options
@given_settings
def plan(
    given: dict[str, Any],
    file: Path,
    gpus: Annotated[str | None, Help("Plan MODEL on the GPUs of one host, like 4x3090 or 2x3090,1x4090.", "COUNTxKIND,…")] = None,
    partition: Annotated[str | None, Help("Partition to plan (default: the default of the file).", "NAME")] = None,
    files: Annotated[bool, Help("Print the files of the checkpoints that each host needs instead.")] = False,
    draft_top1: Annotated[
        Annotated[float, Meta(ge=0.01, le=0.99)] | None,
        Help("Measured share of tokens that are the first choice of the plan's draft (default: an estimate by its size).", "X"),
    ] = None,
    pass_ms: Annotated[
        Milliseconds, Help("Measured time of a token of pp without links, as on one machine (default: by data sheets).", "MS")
    ] = None,
    timestep_ms: Annotated[
        Milliseconds, Help("Measured time of a timestep of the default method without links: the least that it takes.", "MS")
    ] = None,
    timesteps: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Help("Measured timesteps of a token of the default method there (default: an estimate).", "X"),
    ] = None,
    train: Annotated[
        Literal["bita"] | None, Help("Print what `pipedec train bita` needs on the GPUs of the stages instead.")
    ] = None,
) -> None:
    """Print the layers, memory and expected time of every rank, and the expected time per token.

    FILE is a cluster.yaml, whose keys other options replace. With --gpus it is a MODEL, with its draft in --draft: a directory, a
    name on the Hugging Face Hub, of which only config.json is downloaded, or a known shape like llama-3.1-70b:awq. Nothing is
    started. Exits with status 1 if the model does not fit into the devices' memory.
    """
    page, measured = Console(width=100 if not Console().is_terminal else None), Measured(pass_ms, timestep_ms, timesteps)
    if gpus is not None:
        refuse_flags(("partition", "files"), "goes with a cluster.yaml, not with --gpus: leave it out")
        given |= {"target": str(file)}
        given |= pinned(Models(given["target"], given.get("draft"), given.get("bita")), sizes_only=True)
        made = replace(one_host_plan(gpus_of(gpus), given, measured), target=str(file))
    else:
        config = load_cluster(file).for_partition(partition, given)
        config = config.for_partition(given=pinned(config.settings.models, sizes_only=not files))
        if files:
            parts = host_parts(config, spare_places(config))
            page.print(files_table(parts.keys(), needed_files(parts)))
            return
        made = make_plan(config, None, measured)
    if train is not None:
        from pipedec.train.bita import BitaRecipe  # which loads torch

        recipe = BitaRecipe()
        table, lacking = training_table(made, recipe.max_length, recipe.groups * recipe.masks, recipe.prompt_tokens)
        page.print(table)
        if lacking:
            raise PipedecError(f"ranks {', '.join(map(str, lacking))} lack memory for training: use more or larger GPUs")
        return
    page.print(plan_table(made, draft_top1))
    if made.problems:
        quantize = None if gpus is None else fitting_quantize(gpus_of(gpus), given, measured)
        hint = "" if quantize is None else f" (it would with --quantize {quantize})"
        raise PipedecError(f"it does not fit{hint}: " + "; ".join(made.problems))
