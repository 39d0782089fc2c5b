"""One rank of a resident cluster, from process start to process end.

Owns the order in which a rank comes up (meet the others, load its own weights, say that it is alive, serve) and goes down.
Started by torchrun (``torchrun … -m pipedec.engine.rank``) on every host, or by ``LocalCluster`` on one machine.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pipedec.config import ClusterConfig, load_cluster, redis_url_from_environment
from pipedec.core import PipedecError, RankLost, UserError
from pipedec.engine.coordinator import DraftLoop
from pipedec.engine.dialects import Dialects
from pipedec.engine.plan import plan
from pipedec.engine.prompt import Prompter
from pipedec.engine.rank_loop import RankLoop, StageLoop, Wiring, rank_name
from pipedec.engine.spec import PipelineSpec
from pipedec.hardware import MODEL_SHAPES
from pipedec.model import ModelConfig
from pipedec.scheduler import RedisScheduler, Scheduler, Topology, connect
from pipedec.tracing import Tracer
from pipedec.transport import Transport
from pipedec.transport.torch_distributed import Rendezvous, TorchTransport

LEASE_RENEWAL_SECONDS = 1.0
GIVE_UP_SECONDS = 5.0
MEETING_SECONDS = 120.0
LOADING_SECONDS = 3600.0
STARTING = -1  # the answer that belongs to no request: on it the ranks say that they have loaded

Report = Callable[[str, int, int], None]  # what happens, how much of it is done, how much there is


@dataclass(frozen=True)
class RankPlace:
    """Which rank this process is, and where it meets the others."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str
    transport: str = "auto"


@dataclass(frozen=True)
class RunAddress:
    """Where a run's scheduler is: a Redis URL (with its password: never print it) and the run's name."""

    redis_url: str
    run_id: str

    def scheduler(self, spec: PipelineSpec) -> RedisScheduler:
        return RedisScheduler(connect(self.redis_url), self.run_id, spec.topology)


class LeaseKeeper:
    """Holds a rank's lease from a thread, so that a long computation is not taken for a death.

    The thread also ends the process when the run has failed and the rank does not notice, because it waits in a transfer
    for a peer that has stopped, or when the process itself was stopped for longer than its lease.
    """

    def __init__(self, scheduler: RedisScheduler, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease of rank {rank}", daemon=True)

    def start(self) -> None:
        self._scheduler.renew_lease(self._rank)
        self._thread.start()

    def stop(self) -> None:
        """Give up the lease: this rank ends in order."""
        self._ended.set()
        self._thread.join(timeout=2 * LEASE_RENEWAL_SECONDS)
        self._scheduler.leave(self._rank)

    def _lost_peer(self) -> str | None:
        """Who stands still, if anybody: all ranks are told, also those that wait for it in a transfer or for a task."""
        lost = self._scheduler.expired_ranks()
        if not lost:
            return None
        message = f"{', '.join(map(rank_name, lost))} stopped answering"
        self._scheduler.abort(self._rank, message)
        return message

    def _keep(self) -> None:
        failure: str | None = None
        renewed = time.monotonic()
        while failure is None:
            if self._ended.wait(LEASE_RENEWAL_SECONDS):
                return
            if (late := time.monotonic() - renewed) > self._scheduler.lease_ms / 1000:
                failure = f"stood still for {late:.0f} s, longer than its lease"
                break
            try:
                self._scheduler.renew_lease(self._rank)
                renewed = time.monotonic()
                failure = self._scheduler.failure() or self._lost_peer()
            except PipedecError as error:
                failure = str(error)
        if not self._ended.wait(GIVE_UP_SECONDS):  # the rank's own loop finds the same and says so, unless it is stuck
            print(f"pipedec rank {self._rank}: {failure}", file=sys.stderr, flush=True)
            os._exit(1)


def run_rank(place: RankPlace, spec: PipelineSpec, address: RunAddress, report: Report) -> int:
    """Serve as one rank until the run is stopped; returns the exit status.

    Whatever goes wrong is told to the other ranks and to whoever waits for an answer, then printed in one line. The process
    should then end by ``os._exit``: a process group that lost a peer can hang in its own clean-up.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_world_size))
    scheduler: RedisScheduler | None = None
    try:
        scheduler = address.scheduler(spec)
        _serve(place, spec, scheduler, report)
        return 0
    except PipedecError as error:
        message = str(error).removeprefix(f"rank {place.rank} ")
    except Exception as error:
        traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
    _tell_others(scheduler, place.rank, message)
    print(f"pipedec rank {place.rank}: {message}", file=sys.stderr, flush=True)
    return 1


def _serve(place: RankPlace, spec: PipelineSpec, scheduler: RedisScheduler, report: Report) -> None:
    device = spec.rank_device(place.rank, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    transport = _meet(place, spec, device)
    lease = LeaseKeeper(scheduler, place.rank)
    lease.start()
    loop = _load(place, spec, device, scheduler, transport, report)
    scheduler.publish(STARTING, {"loaded": place.rank})
    if place.rank == 0:
        _wait_for_ranks(scheduler, place.world_size)
        scheduler.open(spec.description())
        report("ready", 1, 1)
    loop.run()
    lease.stop()
    if place.rank == 0:
        _wait_for_leavers(scheduler)
        scheduler.clear()
    transport.close()


def _meet(place: RankPlace, spec: PipelineSpec, device: torch.device) -> Transport:
    backend = place.transport
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" and _gpus_suffice(place, spec) else "gloo"
    rendezvous = Rendezvous(place.rank, place.world_size, place.init_method, MEETING_SECONDS)
    hidden_size = ModelConfig.from_directory(spec.target).hidden_size
    return TorchTransport(backend, rendezvous, hidden_size, spec.torch_dtype, device)


def _gpus_suffice(place: RankPlace, spec: PipelineSpec) -> bool:
    """Whether every rank of this host that needs a GPU has its own: all but rank 0 without a draft.

    The ranks of a host are consecutive, so rank 0 is among them where a rank is also the local rank.
    """
    without_gpu = 1 if spec.draft is None and place.rank == place.local_rank else 0
    return torch.cuda.device_count() >= place.local_world_size - without_gpu


def _load(
    place: RankPlace, spec: PipelineSpec, device: torch.device, scheduler: RedisScheduler, transport: Transport, report: Report
) -> RankLoop:
    def progress(done: int, total: int) -> None:
        report("loading", done, total)

    tracer = Tracer(place.rank, clock_offset_us=_clock_offset_us(scheduler))
    wiring = Wiring(scheduler, transport, spec.topology, tracer, spec.emulation, spec.window, Dialects(spec.target))
    if place.rank == 0:
        prompter = Prompter(spec.target, ModelConfig.from_directory(spec.target).max_positions)
        drafter = spec.load_drafter(device, progress)
        return DraftLoop(prompter, drafter, spec.trained_masks(), device, wiring)
    worker = spec.load_stage(place.rank, device, progress)
    return StageLoop(worker, device, place.rank, wiring)


def claim_run(scheduler: RedisScheduler) -> None:
    """Make sure that nobody else's ranks serve under this run's name, and delete what a run that died has left.

    To be called before the ranks meet: until then no rank of this run has written anything.

    Raises:
        UserError: a run of this name is up.
    """
    deadline = time.monotonic() + scheduler.lease_ms / 1000 + LEASE_RENEWAL_SECONDS
    while (run := _run_found(scheduler)).status().alive:
        if time.monotonic() > deadline:  # not the last leases of ranks that are dead
            name = scheduler.keys.run_id
            raise UserError(f"a run named {name!r} is already up on that Redis: stop it, or give another --run NAME")
        time.sleep(0.2)
    run.clear()


def _run_found(scheduler: RedisScheduler) -> RedisScheduler:
    """The run that has this name now, which may have more ranks than ours will have."""
    stages = max([scheduler.topology.num_stages, *scheduler.members()])
    return RedisScheduler(scheduler.client, scheduler.keys.run_id, Topology.even(stages, 1))


def _clock_offset_us(scheduler: RedisScheduler) -> int:
    """Redis's clock minus ours, from the quickest of several questions (a slow answer says little)."""
    samples = []
    for _ in range(8):
        before_us = time.time_ns() // 1000
        theirs_us = scheduler.clock_us()
        after_us = time.time_ns() // 1000
        samples.append((after_us - before_us, theirs_us - (before_us + after_us) // 2))
    return min(samples)[1]


def _wait_for_ranks(scheduler: RedisScheduler, world_size: int) -> None:
    """Rank 0 opens the run when every rank has its weights."""
    deadline = time.monotonic() + LOADING_SECONDS
    missing, position = set(range(world_size)), "0"
    while missing:
        events = scheduler.read_answer(STARTING, position, LEASE_RENEWAL_SECONDS)
        for position, event in events:  # noqa: B007 - the position goes on into the next read
            missing.discard(event["loaded"])
        if time.monotonic() > deadline:
            raise RankLost(f"ranks {sorted(missing)} have not loaded their weights within {LOADING_SECONDS:.0f} s")
        if failure := scheduler.failure():
            raise PipedecError(failure)
        if lost := scheduler.expired_ranks():
            raise RankLost(f"{', '.join(f'rank {rank}' for rank in lost)} stopped answering while it loaded its weights")
    scheduler.close_answer(STARTING)


def _wait_for_leavers(scheduler: RedisScheduler) -> None:
    """Rank 0 deletes the run's keys last, when nobody needs them any more; ranks that never leave have died."""
    deadline = time.monotonic() + 10.0
    while scheduler.members() and time.monotonic() < deadline:
        time.sleep(0.02)


def _tell_others(scheduler: Scheduler | None, rank: int, message: str) -> None:
    if scheduler is None:
        return
    try:
        scheduler.abort(rank, message)
    except PipedecError:
        print(f"pipedec rank {rank}: could not tell the other ranks", file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Entry point under torchrun. Exits 0 after ``pipedec down``, 1 after anything else."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun passes Ctrl-C on and waits for the ranks to end
    die_with_parent()
    try:
        place, spec, address = parse_arguments(sys.argv[1:])
        claim_run(address.scheduler(spec))
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
    parser = argparse.ArgumentParser(prog="torchrun … -m -- pipedec.engine.rank", description=__doc__)
    parser.add_argument("--redis", help="redis://:password@host:port/0; default: $PIPEDEC_REDIS_URL, then the config's")
    parser.add_argument("--run", default="default", help="name of the run; several runs may share a Redis")
    parser.add_argument("--config", type=Path, help="cluster.yaml: models, dtype, Redis and a partition; flags go before it")
    parser.add_argument("--partition", help="partition of the config; default: the config's own")
    parser.add_argument("--stages", type=int, help="default: 4")
    parser.add_argument("--groups", type=int, help="groups of stages that share a timestep slot; default: one per stage")
    parser.add_argument("--layers", help="layers of each stage, like 6,6,6,6; default: even")
    parser.add_argument("--target", type=Path, help="checkpoint directory; default: the shipped pair")
    parser.add_argument("--draft", help="checkpoint directory, or none")
    parser.add_argument("--bita", help="what pipedec train bita has learned for the target: a directory, or none")
    parser.add_argument("--dtype", help="default: float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--transport", default="auto", choices=("auto", "gloo", "nccl"))
    parser.add_argument("--dispatch", default="windows", help="what Redis grants: windows of timesteps, or tasks")
    flags = parser.parse_args(arguments)
    wishes = _Wishes.from_flags(flags)
    if flags.config is not None:
        wishes = wishes.completed(load_cluster(flags.config), flags.partition)
    elif flags.partition is not None:
        raise UserError("--partition names a partition of a file: give --config cluster.yaml with it")
    if wishes.redis_url is None:
        raise UserError("torchrun ranks need a Redis that all hosts reach: give --redis URL or set PIPEDEC_REDIS_URL")
    spec = PipelineSpec.create(
        wishes.target,
        wishes.draft,
        wishes.stages or 4,
        wishes.groups,
        wishes.layers,
        wishes.dtype or "float32",
        flags.device,
        flags.dispatch,
        wishes.bita,
    )
    return _torchrun_place(spec, flags.transport), spec, RunAddress(wishes.redis_url, flags.run)


@dataclass(frozen=True)
class _Wishes:
    """What the flags say about the pipeline, None where they are silent."""

    redis_url: str | None
    target: str | Path | None
    draft: str | None
    bita: str | None
    stages: int | None
    groups: int | None
    layers: list[int] | None
    dtype: str | None

    @classmethod
    def from_flags(cls, flags: argparse.Namespace) -> _Wishes:
        try:
            layers = [int(count) for count in flags.layers.split(",")] if flags.layers else None
        except ValueError:
            raise UserError(f"--layers {flags.layers}: write numbers with commas between them, like 6,6,6,6") from None
        redis_url = redis_url_from_environment(flags.redis)
        return cls(redis_url, flags.target, flags.draft, flags.bita, flags.stages, flags.groups, layers, flags.dtype)

    def completed(self, config: ClusterConfig, partition: str | None) -> _Wishes:
        """What the flags leave open comes from a partition of ``config``.

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
        return _Wishes(
            redis_url=self.redis_url or config.redis.connection_url,
            target=target,
            draft=draft,
            bita=self.bita or config.bita,
            stages=part.stages,
            groups=self.groups or part.num_groups,
            layers=self.layers or [len(stage.layers) for stage in plan(config, name).stages],
            dtype=self.dtype or config.dtype,
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
