"""One rank under torchrun: its flags, torchrun's environment, its exit status.

Started on every host by ``torchrun … -m -- pipedec.cluster.torchrun``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedec.cluster.address import RankPlace, RunAddress
from pipedec.cluster.entry import run_rank
from pipedec.cluster.lease import claim_run
from pipedec.cluster.place import checked_host
from pipedec.cluster.processes import die_with_parent
from pipedec.config import ClusterConfig, load_cluster, redis_url_from_environment
from pipedec.core import PipedecError, RankLost, UserError
from pipedec.hardware import QUANTIZED_BITS
from pipedec.messages import RankDescription
from pipedec.plan.placement import rank_places
from pipedec.scheduler import RedisScheduler
from pipedec.topology import Topology, rank_name
from pipedec.transport.rendezvous import MEETING_SECONDS, Store, store_from_environment, wait_for_key
from pipedec.validation import byte_size

if TYPE_CHECKING:
    from pipedec.engine.spec import PipelineSpec

_CLAIMED = "pipedec/claimed"
_LIMITS = ("max_model_len", "max_num_seqs", "max_waiting", "prefix_cache")


def main() -> None:
    """Entry point under torchrun. Exits 0 after ``pipedec down``, 1 after anything else.

    torchrun writes to standard error what it thinks of an end; this process writes to standard output, so that they can be kept
    apart.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun passes Ctrl-C on and waits for the ranks to end
    die_with_parent()
    # The ranks share the file: each line is written at once, whatever PYTHONUNBUFFERED says.
    with os.fdopen(1, "w", buffering=1, closefd=False) as lines, redirect_stdout(lines), redirect_stderr(lines):
        status = _run(sys.argv[1:])
    os._exit(status)


def _run(arguments: list[str]) -> int:
    try:
        job = Job.of(arguments)
        store = store_from_environment(MEETING_SECONDS)
        _claim(job.place, job.address.scheduler(job.topology), store, _restarts())
    except PipedecError as error:
        print(f"pipedec: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    return run_rank(job.place, job.topology, job.spec, job.address, _print_report, store, _print_description)


def _claim(place: RankPlace, scheduler: RedisScheduler, store: Store, restarts: int) -> None:
    """Rank 0 claims the run's name; the others wait for that, because it deletes what a dead run has left.

    Ranks that torchrun has started again go on with the run that they served before: its requests are in Redis.
    """
    claimed = f"{_CLAIMED}/{restarts}"  # torchrun's store may last longer than the ranks
    if place.rank == 0:
        if restarts == 0 or not _takes_up(scheduler):
            claim_run(scheduler)
        store.set(claimed, "yes")
    elif not wait_for_key(store, claimed, MEETING_SECONDS):
        raise RankLost("rank 0 (draft) ended before the ranks could meet: see what it says")


def _takes_up(scheduler: RedisScheduler) -> bool:
    """Begin the next epoch of the run that these ranks have served; whether there is one. PipedecError if it has failed."""
    if (epoch := scheduler.current_epoch()) is None:
        return False
    scheduler.enter(epoch)
    scheduler.recover(scheduler.topology.ranks, "a rank was lost, and torchrun has started all of them again")
    return True


def _restarts(count: str = "RESTART_COUNT") -> int:
    """How often torchrun has started these ranks again; or, of MAX_RESTARTS, how often it may."""
    return int(os.environ.get(f"TORCHELASTIC_{count}", "0"))


@dataclass(frozen=True)
class Job:
    """What the flags and torchrun's environment say. No checkpoint has been looked at yet.

    Attributes:
        config: with one partition, in which flags have replaced what they give; None without a file.
    """

    place: RankPlace
    address: RunAddress
    topology: Topology
    flags: argparse.Namespace
    config: ClusterConfig | None = None

    @classmethod
    def of(cls, arguments: list[str]) -> Job:
        """Raises UserError if a flag is wrong, or the number of processes is not stages + 1."""
        flags = _parser().parse_args(arguments)
        redis_url = redis_url_from_environment(flags.redis)
        config, stages, groups = None, flags.stages or 4, flags.groups
        if flags.config is not None:
            config = _planned(load_cluster(flags.config), flags)
            _, partition = config.find_partition()
            redis_url, stages, groups = redis_url or config.redis.connection_url, partition.stages, partition.num_groups
        elif flags.partition is not None:
            raise UserError("--partition names a partition of a file: give --config cluster.yaml with it")
        if redis_url is None:
            raise UserError("torchrun ranks need a Redis that all hosts reach: give --redis URL or set PIPEDEC_REDIS_URL")
        topology = Topology.even(stages, groups or stages)
        return cls(_torchrun_place(topology, flags.transport), RunAddress(redis_url, flags.run), topology, flags, config)

    def spec(self) -> PipelineSpec:
        """The pipeline.

        Raises:
            UserError: this host is not the planned one, or something is wrong with the checkpoints or numbers.
        """
        if self.config is not None:
            checked_host(self.place, rank_places(self.config), self.config.servers)  # before torch is loaded
        from pipedec.engine.spec import Cut, Limits, Models, PipelineSpec

        flags = self.flags
        if self.config is not None:
            return PipelineSpec.from_config(self.config, None, flags.device, flags.dispatch)
        formats = flags.quantize, flags.draft_dtype or "auto", flags.draft_quantize
        models = Models(flags.target, flags.draft, flags.bita, *formats)
        cut = Cut(self.topology.num_stages, self.topology.num_groups, _counts(flags.layers))
        given = {name: getattr(flags, name) for name in _LIMITS if getattr(flags, name) is not None}
        if flags.kv_cache_memory is not None:
            given["kv_cache_memory"] = byte_size(flags.kv_cache_memory, "--kv-cache-memory")
        return PipelineSpec.create(models, cut, flags.dtype or "auto", flags.device, flags.dispatch, Limits(**given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchrun … -m -- pipedec.cluster.torchrun", description=__doc__)
    parser.add_argument(
        "--redis", metavar="URL", help="redis://:password@host:port/0; default: $PIPEDEC_REDIS_URL, then the config's"
    )
    parser.add_argument("--run", default="default", help="name of the run; several runs may share a Redis")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="cluster.yaml: models, limits, Redis and partitions; flags override it"
    )
    parser.add_argument("--partition", metavar="NAME", help="partition of the config; default: the one it names")
    parser.add_argument("--stages", type=int, metavar="N", help="pipeline stages, one process each; default: 4")
    parser.add_argument(
        "--groups", type=int, metavar="N", help="groups of stages that share a timestep slot; default: one per stage"
    )
    parser.add_argument("--layers", metavar="N,N,…", help="layers of each stage, like 6,6,6,6; default: even")
    parser.add_argument("--target", type=Path, metavar="DIR", help="target checkpoint directory; default: the shipped pair")
    parser.add_argument("--draft", metavar="DIR|none", help="draft checkpoint directory")
    parser.add_argument("--bita", metavar="DIR|none", help="directory that pipedec train bita wrote for the target")
    parser.add_argument("--dtype", help="auto, float32, float64, bfloat16 or float16; default: the config's, else auto")
    parser.add_argument("--quantize", choices=tuple(QUANTIZED_BITS), help="weights of the target in fewer bits")
    parser.add_argument("--draft-dtype", help="of the draft; default: the config's, else auto")
    parser.add_argument("--draft-quantize", choices=tuple(QUANTIZED_BITS), help="weights of the draft in fewer bits")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="maximum tokens of prompt and answer; default: the config's"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="most requests in the pipeline at the same time; default: the config's"
    )
    parser.add_argument(
        "--max-waiting", type=int, metavar="N", help="most waiting requests, further ones are refused; default: the config's"
    )
    parser.add_argument(
        "--kv-cache-memory", metavar="SIZE", help="memory for keys and values on each rank, like 4GiB; default: the config's"
    )
    parser.add_argument(
        "--no-prefix-cache", dest="prefix_cache", action="store_false", default=None, help="compute every prompt anew"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; default: auto")
    parser.add_argument("--transport", default="auto", choices=("auto", "gloo", "nccl"), help="default: auto")
    parser.add_argument("--dispatch", default="windows", help="windows of timesteps, or single tasks; default: windows")
    return parser


def _counts(layers: str | None) -> tuple[int, ...] | None:
    try:
        return tuple(int(count) for count in layers.split(",")) if layers else None
    except ValueError:
        raise UserError(f"--layers {layers}: write numbers with commas between them, like 6,6,6,6") from None


def _planned(config: ClusterConfig, flags: argparse.Namespace) -> ClusterConfig:
    """With one partition alone, in which flags take precedence.

    Raises:
        UserError: there is no such partition, or it has another number of stages.
    """
    name, part = config.find_partition(flags.partition)
    if flags.stages not in (None, part.stages):
        raise UserError(f"--stages {flags.stages}, but partition {name} has {part.stages} stages: leave out one of them")
    given = {"target": flags.target and str(flags.target), "draft": flags.draft, "bita": flags.bita, "groups": flags.groups,
             "layers": _counts(flags.layers), "dtype": flags.dtype, "max_model_len": flags.max_model_len,
             "quantize": flags.quantize, "draft_dtype": flags.draft_dtype, "draft_quantize": flags.draft_quantize}  # fmt: skip
    own = replace(part, **{key: value for key, value in given.items() if value is not None})
    names = ("max_num_seqs", "max_waiting", "kv_cache_memory", "prefix_cache")
    limits = {name: getattr(flags, name) for name in names}
    shared: dict[str, Any] = {key: value for key, value in limits.items() if value is not None}
    return replace(config, partitions={name: own}, partition=name, **shared)


def _torchrun_place(topology: Topology, transport: str) -> RankPlace:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name not in os.environ for name in names):
        raise UserError("start this module with torchrun, or use pipedec up on one machine")
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names)
    stages = topology.num_stages
    if world_size != stages + 1:
        raise UserError(
            f"{world_size} processes, but {stages} stages and the draft rank make {stages + 1}: "
            f"let --nnodes × --nproc-per-node be {stages + 1}, or change --stages"
        )
    recovers = _restarts() < _restarts("MAX_RESTARTS")
    return RankPlace(rank, world_size, local_rank, local_world_size, transport, recovers=recovers, survives=not recovers)


def _print_description(description: RankDescription) -> None:
    print(f"pipedec {rank_name(description.rank)} on {description.host}: {description}", file=sys.stderr, flush=True)


def _print_report(what: str, done: int, total: int) -> None:
    """Rank 0 says when all ranks are ready; that this one has loaded its weights, its description says."""
    if what == "ready":
        print("pipedec: the cluster takes requests", flush=True)


if __name__ == "__main__":
    main()
