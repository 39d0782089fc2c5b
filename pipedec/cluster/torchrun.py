"""One rank under torchrun: its flags, torchrun's environment, its exit status.

Started on every host by ``torchrun … -m -- pipedec.cluster.torchrun``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

from pipedec.cluster.address import RankPlace, RunAddress
from pipedec.cluster.lease import claim_run
from pipedec.cluster.meeting import MEETING_SECONDS
from pipedec.cluster.processes import die_with_parent
from pipedec.cluster.rank import run_rank
from pipedec.config import ClusterConfig, load_cluster, redis_url_from_environment
from pipedec.core import PipedecError, RankLost, UserError
from pipedec.engine.spec import Cut, Models, PipelineSpec
from pipedec.messages import RankDescription
from pipedec.scheduler import RedisScheduler
from pipedec.topology import rank_name
from pipedec.transport.rendezvous import Store, store_from_environment, wait_for_key

_CLAIMED = "pipedec/claimed"


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
        place, spec, address = parse_arguments(arguments)
        store = store_from_environment(MEETING_SECONDS)
        _claim(place, address.scheduler(spec.topology), store)
    except PipedecError as error:
        print(f"pipedec: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    return run_rank(place, spec, address, _print_report, store, _print_description)


def _claim(place: RankPlace, scheduler: RedisScheduler, store: Store) -> None:
    """Rank 0 claims the run's name; the others wait for that, because it deletes what a dead run has left."""
    if place.rank == 0:
        claim_run(scheduler)
        store.set(_CLAIMED, "yes")
    elif not wait_for_key(store, _CLAIMED, MEETING_SECONDS):
        raise RankLost("rank 0 (draft) ended before the ranks could meet: see what it says")


def parse_arguments(arguments: list[str]) -> tuple[RankPlace, PipelineSpec, RunAddress]:
    """The flags of the rank entry point and torchrun's environment.

    Raises:
        UserError: a flag is wrong, or the number of processes is not stages + 1.
    """
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
    parser.add_argument("--dtype", help="float32, float64, bfloat16 or float16; default: float32")
    parser.add_argument(
        "--context-tokens", type=int, metavar="N", help="maximum tokens of prompt and answer; default: the config's"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; default: auto")
    parser.add_argument("--transport", default="auto", choices=("auto", "gloo", "nccl"), help="default: auto")
    parser.add_argument("--dispatch", default="windows", help="windows of timesteps, or single tasks; default: windows")
    flags = parser.parse_args(arguments)
    redis_url = redis_url_from_environment(flags.redis)
    if flags.config is not None:
        config = load_cluster(flags.config)
        spec, redis_url = _planned(config, flags), redis_url or config.redis.connection_url
    elif flags.partition is not None:
        raise UserError("--partition names a partition of a file: give --config cluster.yaml with it")
    else:
        models, cut = Models(flags.target, flags.draft, flags.bita), Cut(flags.stages or 4, flags.groups, _counts(flags.layers))
        spec = PipelineSpec.create(
            models, cut, flags.dtype or "float32", flags.device, flags.dispatch, flags.context_tokens
        )  # fmt: skip
    if redis_url is None:
        raise UserError("torchrun ranks need a Redis that all hosts reach: give --redis URL or set PIPEDEC_REDIS_URL")
    return _torchrun_place(spec, flags.transport), spec, RunAddress(redis_url, flags.run)


def _counts(layers: str | None) -> tuple[int, ...] | None:
    try:
        return tuple(int(count) for count in layers.split(",")) if layers else None
    except ValueError:
        raise UserError(f"--layers {layers}: write numbers with commas between them, like 6,6,6,6") from None


def _planned(config: ClusterConfig, flags: argparse.Namespace) -> PipelineSpec:
    """The pipeline of a partition of ``config``; flags take precedence.

    Raises:
        UserError: there is no such partition, it has another number of stages, or a model is a shape without weights.
    """
    name, part = config.find_partition(flags.partition)
    if flags.stages not in (None, part.stages):
        raise UserError(f"--stages {flags.stages}, but partition {name} has {part.stages} stages: leave out one of them")
    given = {"target": flags.target and str(flags.target), "draft": flags.draft, "bita": flags.bita, "groups": flags.groups,
             "layers": _counts(flags.layers), "dtype": flags.dtype, "context_tokens": flags.context_tokens}  # fmt: skip
    own = replace(part, **{key: value for key, value in given.items() if value is not None})
    return PipelineSpec.from_config(replace(config, partitions={name: own}, partition=name), name, flags.device, flags.dispatch)


def _torchrun_place(spec: PipelineSpec, transport: str) -> RankPlace:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name not in os.environ for name in names):
        raise UserError("start this module with torchrun, or use pipedec up on one machine")
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names)
    if world_size != spec.num_stages + 1:
        raise UserError(
            f"{world_size} processes, but {spec.num_stages} stages and the draft rank make {spec.num_stages + 1}: "
            f"let --nnodes × --nproc-per-node be {spec.num_stages + 1}, or change --stages"
        )
    return RankPlace(rank, world_size, local_rank, local_world_size, transport)


def _print_description(description: RankDescription) -> None:
    print(f"pipedec {rank_name(description.rank)} on {description.host}: {description}", file=sys.stderr, flush=True)


def _print_report(what: str, done: int, total: int) -> None:
    """Rank 0 says when all ranks are ready; that this one has loaded its weights, its description says."""
    if what == "ready":
        print("pipedec: the cluster takes requests", flush=True)


if __name__ == "__main__":
    main()
