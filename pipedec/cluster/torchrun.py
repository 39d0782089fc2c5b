"""One rank under torchrun: its flags, torchrun's environment, its exit status.

Started on every host by ``torchrun … -m -- pipedec.cluster.torchrun``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from pipedec.cluster.address import RunAddress
from pipedec.cluster.lease import claim_run
from pipedec.cluster.processes import die_with_parent
from pipedec.cluster.rank import RankPlace, Report, run_rank
from pipedec.config import ClusterConfig, load_cluster, redis_url_from_environment
from pipedec.core import PipedecError, UserError
from pipedec.engine.spec import Cut, Models, PipelineSpec
from pipedec.hardware import MODEL_SHAPES
from pipedec.methods import LayerTreeOptions
from pipedec.plan.partition import plan


def main() -> None:
    """Entry point under torchrun. Exits 0 after ``pipedec down``, 1 after anything else."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun passes Ctrl-C on and waits for the ranks to end
    die_with_parent()
    try:
        place, spec, address = parse_arguments(sys.argv[1:])
        claim_run(address.scheduler(spec.topology))
    except PipedecError as error:
        print(f"pipedec: {error}", file=sys.stderr, flush=True)
        os._exit(2 if isinstance(error, UserError) else 1)
    status = run_rank(place, spec, address, _print_report(place.rank))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
    settings = _Settings.from_flags(flags)
    if flags.config is not None:
        settings = settings.completed(load_cluster(flags.config), flags.partition)
    elif flags.partition is not None:
        raise UserError("--partition names a partition of a file: give --config cluster.yaml with it")
    if settings.redis_url is None:
        raise UserError("torchrun ranks need a Redis that all hosts reach: give --redis URL or set PIPEDEC_REDIS_URL")
    models = Models(settings.target, settings.draft, settings.bita)
    cut = Cut(settings.stages or 4, settings.groups, settings.layers)
    dtype, limit = settings.dtype or "float32", settings.context_tokens
    spec = PipelineSpec.create(models, cut, dtype, flags.device, flags.dispatch, limit, settings.tree)
    return _torchrun_place(spec, flags.transport), spec, RunAddress(settings.redis_url, flags.run)


@dataclass(frozen=True)
class _Settings:
    """The pipeline's settings from flags and the config; None if not given."""

    redis_url: str | None
    target: str | Path | None
    draft: str | None
    bita: str | None
    stages: int | None
    groups: int | None
    layers: list[int] | None
    dtype: str | None
    context_tokens: int | None
    tree: LayerTreeOptions | None = None  # of the config alone

    @classmethod
    def from_flags(cls, flags: argparse.Namespace) -> _Settings:
        try:
            layers = [int(count) for count in flags.layers.split(",")] if flags.layers else None
        except ValueError:
            raise UserError(f"--layers {flags.layers}: write numbers with commas between them, like 6,6,6,6") from None
        redis_url = redis_url_from_environment(flags.redis)
        return cls(
            redis_url,
            flags.target,
            flags.draft,
            flags.bita,
            flags.stages,
            flags.groups,
            layers,
            flags.dtype,
            flags.context_tokens,
        )

    def completed(self, config: ClusterConfig, partition: str | None) -> _Settings:
        """With the settings of a partition of ``config`` where no flag is given.

        Raises:
            UserError: there is no such partition, it has another number of stages, or a model is a shape without weights.
        """
        name, part = config.find_partition(partition)
        target, draft = self.target or config.target, self.draft or config.draft
        for key, model in (("target", target), ("draft", draft)):
            if str(model) in MODEL_SHAPES:
                raise UserError(f"{key}: {model} is a shape to plan with and has no weights: give a checkpoint directory")
        if self.stages not in (None, part.stages):
            raise UserError(f"--stages {self.stages}, but partition {name} has {part.stages} stages: leave out one of them")
        return _Settings(
            redis_url=self.redis_url or config.redis.connection_url,
            target=target,
            draft=draft,
            bita=self.bita or config.bita,
            stages=part.stages,
            groups=self.groups or part.num_groups,
            layers=self.layers or [len(stage.layers) for stage in plan(config, name).stages],
            dtype=self.dtype or config.dtype,
            context_tokens=config.context_tokens if self.context_tokens is None else self.context_tokens,
            tree=config.tree,
        )


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
    return RankPlace(rank, world_size, local_rank, local_world_size, "env://", transport)


def _print_report(rank: int) -> Report:
    def report(what: str, done: int, total: int) -> None:
        if done == total:
            print(f"pipedec rank {rank}: {what} done", file=sys.stderr, flush=True)

    return report


if __name__ == "__main__":
    main()
