"""One rank under torchrun: its flags, torchrun's environment, its exit status.

Started on every host by ``torchrun … -m -- pipedec.cluster.torchrun``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from pipedec.checkpoints.download import pinned
from pipedec.cluster.entry import run_rank
from pipedec.cluster.lease import claim_run
from pipedec.cluster.place import RankPlace, RunAddress, checked_host
from pipedec.cluster.processes import die_with_parent
from pipedec.config import ClusterConfig, Settings, load_cluster
from pipedec.config.environment import set_rank_environment
from pipedec.config.redis import redis_config
from pipedec.config.settings import given_settings
from pipedec.core.errors import PipedecError, RankLost, UserError
from pipedec.flags import Help, options_of
from pipedec.messages.run import RankDescription
from pipedec.plan.placement import rank_places
from pipedec.scheduler import RunStatus, SupervisorScheduler, read_description
from pipedec.topology import Topology, rank_name

if TYPE_CHECKING:
    from pipedec.plan.spec import PipelineSpec
    from pipedec.transport.rendezvous import Store

_CLAIMED = "pipedec/claimed"
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PROGRAM = "torchrun … -m -- pipedec.cluster.torchrun"


def main() -> None:
    """Entry point under torchrun. Exits 0 after ``pipedec down``, 1 after anything else.

    This process writes to standard output alone, so that its lines can be separated from torchrun's on standard error.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun passes Ctrl-C on and waits for the ranks to end
    die_with_parent()
    # The ranks share the file: each line is written at once, even if PYTHONUNBUFFERED is not set.
    with os.fdopen(1, "w", buffering=1, errors="replace", closefd=False) as lines, redirect_stdout(lines), redirect_stderr(lines):
        status = run(sys.argv[1:])
    os._exit(status)


def run(arguments: list[str]) -> int:
    """Serve as the rank that torchrun's environment describes; returns the exit status."""
    set_rank_environment()
    try:
        job = TorchrunJob.of(arguments)
        from pipedec.transport.rendezvous import MEETING_SECONDS, store_from_environment

        store = store_from_environment(MEETING_SECONDS)
        _claim(job, job.address.scheduler(SupervisorScheduler, job.topology), store)
    except PipedecError as error:
        print(f"pipedec: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1

    def report(what: str, done: int, total: int) -> None:
        if what == "ready":  # other reports add nothing to the descriptions of ranks
            print("pipedec: the cluster takes requests", flush=True)

    def describe(description: RankDescription) -> None:
        print(f"pipedec {rank_name(description.rank)} on {description.host}: {description}", file=sys.stderr, flush=True)

    return run_rank(job.place, job.topology, job.spec, job.address, report, describe)


def _claim(job: TorchrunJob, scheduler: SupervisorScheduler, store: Store) -> None:
    """Rank 0 claims the run's name, which deletes what a dead run has left unless that goes on; the others wait for that.

    Ranks that have been started again, by torchrun or by what starts torchrun, continue the run: its requests are in Redis.
    """
    from pipedec.transport.rendezvous import MEETING_SECONDS, wait_for_key

    claimed = f"{_CLAIMED}/{_restarts()}"  # torchrun's store may last longer than the ranks
    if job.place.rank == 0:
        if _restarts() == 0 or scheduler.current_epoch() is None:
            claim_run(scheduler, partial(_goes_on, job, scheduler))
        if (epoch := scheduler.current_epoch()) is not None:
            scheduler.enter(epoch)
            scheduler.recover(scheduler.topology.ranks, "a rank was lost, and all of them have been started again")
        store.set(claimed, "yes")
    elif not wait_for_key(store, claimed, MEETING_SECONDS):
        raise RankLost("rank 0 (draft) ended before the ranks could meet: see what it says")


def _goes_on(job: TorchrunJob, scheduler: SupervisorScheduler, status: RunStatus) -> bool:
    """Whether the run in Redis is one that losses do not end, with the settings of ``job``."""
    if status.state != "up" or status.failure is not None or not status.recovers:
        return False
    with suppress(PipedecError):  # of another version; a mistake in the settings is reported when the rank starts
        run = read_description(scheduler.client, scheduler.run_id)
        return run is not None and run.settings == job.spec().settings
    return False


def _restarts(count: str = "RESTART_COUNT") -> int:
    """How often torchrun has started these ranks again; with ``MAX_RESTARTS``, how often it may."""
    return int(os.environ.get(f"TORCHELASTIC_{count}", "0"))


@dataclass(frozen=True)
class TorchrunOptions:
    """Options of a rank besides the settings; both take precedence over the file."""

    redis: Annotated[
        str | None, Help("Redis server of the run (default: $PIPEDEC_REDIS_URL, then the file's).", "redis://HOST:PORT/0")
    ] = None
    run: Annotated[str, Help("Name of the run; several runs may share a Redis.", "NAME")] = "default"
    config: Annotated[Path | None, Help("cluster.yaml: settings, Redis and partitions.", "FILE")] = None
    partition: Annotated[str | None, Help("Partition of the file (default: the one that it names).", "NAME")] = None


@dataclass(frozen=True)
class TorchrunJob:
    """Options and environment of a rank; no checkpoint has been read yet. Without a file there is no ``config``."""

    place: RankPlace
    address: RunAddress
    settings: Settings
    config: ClusterConfig | None = None

    @classmethod
    def of(cls, arguments: Sequence[str]) -> TorchrunJob:
        """Raises UserError if an option is wrong, or the number of processes is not stages + 1."""
        try:
            parsed = _command.main(list(arguments), prog_name=_PROGRAM, standalone_mode=False)
        except click.ClickException as error:
            raise UserError(error.format_message()) from None
        if isinstance(parsed, int):  # --help
            raise SystemExit(parsed)
        options, given = parsed
        redis_url, config = redis_config(options.redis).connection_url, None
        if options.config is not None:
            config = load_cluster(options.config).for_partition(options.partition, given)
            redis_url = redis_url or config.redis.connection_url
        elif options.partition is not None:
            raise UserError("--partition names a partition of a file: give --config cluster.yaml with it")
        settings = Settings().parse(given) if config is None else config.settings
        if redis_url is None:
            raise UserError("torchrun ranks need a Redis that all hosts reach: give --redis URL or set PIPEDEC_REDIS_URL")
        if any(name not in os.environ for name in _PLACE):
            raise UserError("start this module with torchrun, or use pipedec up on one machine")
        rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in _PLACE)
        if world_size != (needed := settings.cut.stages + 1):
            raise UserError(
                f"{world_size} processes, but {needed - 1} stages and the draft rank make {needed}: "
                f"let --nnodes × --nproc-per-node be {needed}, or change --stages"
            )
        recovers = _restarts() < _restarts("MAX_RESTARTS")
        place = RankPlace(
            rank, world_size, local_rank, local_world_size, recovers=recovers, survives=not recovers, lists=rank == 0
        )
        return cls(place, RunAddress(redis_url, options.run), settings, config)

    @property
    def topology(self) -> Topology:
        return Topology.even(self.settings.cut.stages, self.settings.cut.num_groups)

    def spec(self) -> PipelineSpec:
        """The pipeline. Raises UserError if this host is not the planned one, or for wrong checkpoints or numbers."""
        if self.config is not None:
            checked_host(self.place, rank_places(self.config), self.config.servers)  # before torch is loaded
        from pipedec.engine.build import resolve, resolve_partition

        if self.config is None:
            return resolve(self.settings, in_parts=True)
        return resolve_partition(self.config.for_partition(given=pinned(self.settings.models)))


@click.command(help=__doc__)
@given_settings
@options_of(TorchrunOptions, "options")
def _command(options: TorchrunOptions, given: dict[str, Any]) -> tuple[TorchrunOptions, dict[str, Any]]:
    return options, given


if __name__ == "__main__":
    main()
