"""``pipedec up``, ``status`` and ``down``: resident clusters, those of ``pipedec launch`` included."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Annotated

import click
from rich.table import Column, Table

from pipedec.cli.answers import local_cluster
from pipedec.cli.options import ClusterFlags, cluster_options
from pipedec.cli.show import Interrupts, console, loading_bars, show_sentence
from pipedec.cluster.logs import log_directory
from pipedec.cluster.processes import die_with_parent
from pipedec.cluster.state import DEFAULT_RUN, RunningCluster, check_unused, process_start, read_state, running_here
from pipedec.cluster.supervisor import Supervisor
from pipedec.config import RedisConfig, Settings, settings_options
from pipedec.config.redis import redis_config
from pipedec.core.errors import PipedecError, SchedulerLost, UserError
from pipedec.flags import Help, own_options
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import Recovery
from pipedec.scheduler import read_description
from pipedec.topology import rank_name
from pipedec.validation import parse_json

Detach = Annotated[bool, Help("Return when the cluster is up and leave it running.")]

DETACH_SECONDS = 3600.0
DOWN_SECONDS = 600.0
CLIENT_GRACE_SECONDS = 1.0


@click.command()
@settings_options
@cluster_options
@own_options
def up(
    settings: Settings, place: ClusterFlags, detach: Detach = False,
    for_parent: Annotated[bool, Help("End with the parent; read settings and print what is up, as JSON.", hidden=True)] = False,
) -> None:  # fmt: skip
    """Start all ranks on this machine, and a Redis unless --redis names one.

    The cluster loads its weights once and serves `pipedec submit` until `pipedec down` or Ctrl-C.
    """
    if for_parent:
        die_with_parent()  # raises BrokenPipeError if it has ended already
        print(json.dumps({"pid": os.getpid()}), flush=True)
        settings = parse_json(Settings, sys.stdin.read())
    server = redis_config(place.redis)
    is_second = for_parent and any(state.run_id == DEFAULT_RUN for state in running_here())  # a server has no --run
    run_id = place.run or (DEFAULT_RUN if server.url and not is_second else f"local-{secrets.token_hex(4)}")
    check_unused(run_id)
    if detach:
        detach_cluster(run_id)
        show_sentence(settings.for_answers()[1])
        return
    cluster = local_cluster(settings.replaced(redis=server), run_id)
    serve_cluster(cluster, {f"{len(cluster.topology.ranks)} ranks": cluster.topology.ranks}, for_parent)


def _announce(running: RunningCluster, description: RunDescription) -> None:
    for rank in description.ranks:
        console.print(f"{rank_name(rank.rank)} on {rank.host}: {rank}", soft_wrap=True)
    stages, groups = len(description.layers), len(description.groups)
    models = f"target {description.target}, draft {description.draft or 'none'}"
    console.print(f"{stages} stages in {groups} groups, {models}.", soft_wrap=True)
    console.print(f"The logs of each host's ranks are in {log_directory(running.run_id)} there.", soft_wrap=True)
    if not (redis := RedisConfig(running.redis_url)).is_here:
        names = f"--redis {redis.url} --run {running.run_id}"
        password = ", with the password in PIPEDEC_REDIS_PASSWORD" if redis.password else ""
        console.print(f"On other hosts: pipedec submit {names} --prompt …, or pipedec serve {names}{password}.", soft_wrap=True)
    console.print(f"Cluster {running.run_id} is up. Next: pipedec submit --prompt …; stop it with pipedec down.", soft_wrap=True)


def serve_cluster(cluster: Supervisor, bars: Mapping[str, Collection[int]], for_parent: bool = False) -> None:
    """Start the cluster, announce it, and supervise it until the run is stopped, a rank dies, or a signal arrives.

    ``for_parent``: where it is, with the password of Redis, is for the parent process alone.
    """
    interrupts = Interrupts()
    cluster.on_recovery = lambda recovery: _print_line(described_recovery(recovery))
    running: RunningCluster | None = None
    try:
        with loading_bars(bars) as progress:
            cluster.start(progress)
        began = process_start(os.getpid())
        running = RunningCluster(cluster.address.redis_url, cluster.run_id, os.getpid(), began, cluster.outlives_supervisor)
        running.save()
        if for_parent:
            print(json.dumps({"redis_url": running.redis_url, "run_id": running.run_id}), flush=True)
        else:
            _announce(running, cluster.description())
        with interrupts.deferred():
            cluster.wait(interrupts.raise_missed)
        cluster.stop()
        _print_line("Cluster stopped.")
    except BaseException:
        if interrupts.has_come:  # the exception may also be another one: a signal can break the code that it interrupts
            _print_line("Stopping the cluster.")
            cluster.stop()
            return
        if running is not None:
            time.sleep(CLIENT_GRACE_SECONDS)  # clients elsewhere read the cause before Redis stops
        cluster.kill()
        raise
    finally:
        if running is not None:
            running.forget()


def _print_line(text: str) -> None:
    """Print a line; if it goes to a file on a full disk, the cluster goes on without."""
    with suppress(OSError):
        console.print(text, soft_wrap=True)


def detach_cluster(run_id: str) -> None:
    """Run the same command as a process of its own session, and wait until the cluster is up."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    log_path = log_directory(run_id) / "cluster.log"
    log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipedec.cli", *arguments, "--run", run_id],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        with console.status("Starting the cluster"):
            deadline = time.monotonic() + DETACH_SECONDS
            while (state := read_state(run_id)) is None or state.pid != process.pid:
                if process.poll() is not None:
                    lines = log_path.read_text(errors="replace").strip().splitlines()
                    kind = UserError if process.returncode == 2 else PipedecError
                    raise kind((lines[-1] if lines else "the cluster did not start").removeprefix("pipedec: "))
                if time.monotonic() > deadline:
                    raise PipedecError(f"the cluster did not come up within {DETACH_SECONDS:.0f} s: see {log_path}")
                time.sleep(0.05)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    line = f"Cluster {state.run_id} is up (process {process.pid}, log {log_path}). Stop it with pipedec down."
    console.print(line, soft_wrap=True)


@click.command()
@cluster_options
def status(place: ClusterFlags) -> None:
    """Show a running cluster: its ranks and its requests."""
    found = place.find()
    scheduler = found.connect()
    current = scheduler.status()
    state = "recovering" if current.is_recovering else current.state
    headings = Column("rank", justify="right"), "role", "alive", "host", "device", Column("since epoch", justify="right")
    table = Table(*headings, title=f"run {found.run_id}: {state}, epoch {current.epoch}", title_justify="left")
    description = read_description(scheduler.client, found.run_id)
    described = {rank.rank: rank for rank in description.ranks} if description else {}
    for rank in scheduler.topology.ranks:
        role = "draft" if rank == 0 else f"stage {rank} (group {scheduler.topology.group_of(rank) + 1})"
        one = described.get(rank)
        where = ("", "", "") if one is None else (one.host, one.device, str(one.since_epoch))
        table.add_row(str(rank), role, "yes" if rank in current.alive else "no", *where)
    console.print(table)
    doing = "; ".join(f"rank {rank} {activity}" for rank, activity in sorted(scheduler.activities().items()))
    console.print(f"Now: {doing}.", soft_wrap=True)
    links = [
        f"rank {rank} to rank {scheduler.topology.following(rank)}: {one.link}" for rank, one in described.items() if one.link
    ]
    if links:
        passage = f" Passage: {current.stats.passage} timesteps." if current.stats else ""
        console.print(f"Links: {'; '.join(links)}.{passage}", soft_wrap=True)
    nodes, places = scheduler.nodes(), scheduler.places()
    if len(nodes) > 1:
        shown = []
        for node, lives in nodes.items():
            ranks = ", ".join(str(rank) for rank in sorted(places) if places[rank] == node)
            part = f"ranks {ranks}" if ranks else "spare"
            shown.append(f"{node} ({part if lives else 'gone'})")
        console.print(f"Hosts: {', '.join(shown)}.", soft_wrap=True)
    running = ", ".join(map(str, current.running)) or "none"
    console.print(f"Requests: {current.submitted} submitted, {current.waiting} waiting, running: {running}.")
    if current.stats is not None:
        kv = current.stats.kv
        console.print(
            f"KV cache: {kv.used} of {kv.capacity} slots in use, {kv.kept} keep prefixes; {kv.cached_tokens} of "
            f"{kv.queried_tokens} prompt tokens were cached; {kv.pauses} pauses.", soft_wrap=True,
        )  # fmt: skip
    if counted := [stage for stage in current.stages if stage.expert_layers]:
        mean = sum(stage.experts for stage in counted) / sum(stage.expert_layers for stage in counted)
        console.print(f"Experts: {mean:.1f} of {counted[0].num_experts} per timestep and layer.")
    if current.recoveries:
        console.print(f"Recoveries: {current.num_recoveries}, the last ones:")
    for recovery in current.recoveries:
        at = datetime.fromtimestamp(recovery.at_us / 1e6).isoformat(" ", "seconds")
        console.print(f"  {at} {described_recovery(recovery)}", soft_wrap=True)


def described_recovery(recovery: Recovery) -> str:
    """Why the run has begun an epoch, and how long it took until that was served, in one line."""
    lasted = "not served yet" if recovery.seconds is None else f"went on after {recovery.seconds:.1f} s"
    cause = "" if recovery.request is None else f", because of request {recovery.request}"
    return f"Epoch {recovery.epoch}: {recovery.reason}{cause}; {lasted}."


@click.command()
@cluster_options
def down(place: ClusterFlags) -> None:
    """Stop a running cluster.

    Running requests are finished first (for up to 20 seconds on a cluster that was started here); waiting requests are refused.
    """
    found = place.find()
    scheduler = found.connect()
    scheduler.stop()
    if found.pid is None or not found.is_alive():
        deadline = time.monotonic() + DOWN_SECONDS
        with suppress(SchedulerLost):  # a Redis that was started with the run has ended with it
            while alive := scheduler.status().alive:
                if time.monotonic() > deadline:
                    raise PipedecError(f"ranks {', '.join(map(str, alive))} have not ended within {DOWN_SECONDS:.0f} s")
                time.sleep(0.05)
            scheduler.clear()
        found.forget()
    elif not found.wait_until_gone():
        os.kill(found.pid, signal.SIGTERM)
        if not found.wait_until_gone():
            raise PipedecError(f"process {found.pid} does not end: kill it with `kill -9 {found.pid}`")
    console.print(f"Cluster {found.run_id} is down.")
