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

from pipedec.config import redis_url_from_environment
from pipedec.core import PipedecError, RankLost, UserError
from pipedec.engine.coordinator import DraftLoop
from pipedec.engine.prompt import Prompter
from pipedec.engine.rank_loop import RankLoop, StageLoop
from pipedec.engine.spec import PipelineSpec
from pipedec.model import ModelConfig
from pipedec.scheduler import RedisScheduler, Scheduler, connect
from pipedec.tracing import Tracer
from pipedec.transport import Transport
from pipedec.transport.torch_distributed import Rendezvous, TorchTransport

LEASE_RENEWAL_SECONDS = 1.0
MEETING_SECONDS = 120.0
LOADING_SECONDS = 3600.0

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
    """Renews a rank's lease from a thread, so that a long computation is not taken for a death."""

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease of rank {rank}", daemon=True)

    def start(self) -> None:
        self._scheduler.renew_lease(self._rank)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=2 * LEASE_RENEWAL_SECONDS)

    def _keep(self) -> None:
        while not self._ended.wait(LEASE_RENEWAL_SECONDS):
            try:
                self._scheduler.renew_lease(self._rank)
            except PipedecError:
                return  # the rank's own loop finds the same and says so


def run_rank(place: RankPlace, spec: PipelineSpec, address: RunAddress, report: Report) -> int:
    """Serve as one rank until the run is stopped; returns the exit status.

    Whatever goes wrong is told to the other ranks and to whoever waits for an answer, then printed in one line.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which stops the ranks in order
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_world_size))
    scheduler: Scheduler | None = None
    try:
        scheduler = address.scheduler(spec)
        _serve(place, spec, scheduler, report)
        return 0
    except PipedecError as error:
        message = str(error)
    except Exception as error:
        traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
    print(f"pipedec rank {place.rank}: {message}", file=sys.stderr, flush=True)
    _tell_others(scheduler, place.rank, message)
    return 1


def _serve(place: RankPlace, spec: PipelineSpec, scheduler: RedisScheduler, report: Report) -> None:
    device = spec.torch_device(place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    transport = _meet(place, spec, device)
    try:
        loop = _load(place, spec, device, scheduler, transport, report)
        lease = LeaseKeeper(scheduler, place.rank)
        lease.start()
        if place.rank == 0:
            _wait_for_ranks(scheduler, place.world_size)
            scheduler.open(spec.description())
            report("ready", 1, 1)
        try:
            loop.run()
        finally:
            lease.stop()
        scheduler.leave(place.rank)
        if place.rank == 0:
            _wait_for_leavers(scheduler)
            scheduler.clear()
    finally:
        transport.close()


def _meet(place: RankPlace, spec: PipelineSpec, device: torch.device) -> Transport:
    backend = place.transport
    if backend == "auto":
        enough_gpus = device.type == "cuda" and torch.cuda.device_count() >= place.local_world_size
        backend = "nccl" if enough_gpus else "gloo"
    rendezvous = Rendezvous(place.rank, place.world_size, place.init_method, MEETING_SECONDS)
    hidden_size = ModelConfig.from_directory(spec.target).hidden_size
    return TorchTransport(backend, rendezvous, hidden_size, spec.torch_dtype, device)


def _load(
    place: RankPlace, spec: PipelineSpec, device: torch.device, scheduler: RedisScheduler, transport: Transport, report: Report
) -> RankLoop:
    def progress(done: int, total: int) -> None:
        report("loading", done, total)

    tracer = Tracer(place.rank, clock_offset_us=scheduler.clock_us() - time.time_ns() // 1000)
    if place.rank == 0:
        prompter = Prompter(spec.target, ModelConfig.from_directory(spec.target).max_positions)
        drafter = spec.load_drafter(device, progress)
        return DraftLoop(prompter, drafter, device, scheduler, transport, spec.topology, tracer)
    worker = spec.load_stage(place.rank, device, progress)
    return StageLoop(worker, device, place.rank, scheduler, transport, spec.topology, tracer)


def _wait_for_ranks(scheduler: RedisScheduler, world_size: int) -> None:
    """Rank 0 opens the run when every rank has its weights."""
    deadline = time.monotonic() + LOADING_SECONDS
    while missing := set(range(world_size)) - set(scheduler.members()):
        if time.monotonic() > deadline:
            raise RankLost(f"ranks {sorted(missing)} have not loaded their weights within {LOADING_SECONDS:.0f} s")
        if failure := scheduler.failure():
            raise PipedecError(failure)
        time.sleep(0.02)


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
    die_with_parent()
    try:
        place, spec, address = parse_arguments(sys.argv[1:])
    except UserError as error:
        print(f"pipedec: {error}", file=sys.stderr)
        os._exit(2)
    status = run_rank(place, spec, address, _print_report(place.rank))
    # A process group that lost a peer can hang in its own clean-up: the process is disposable.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def parse_arguments(arguments: list[str]) -> tuple[RankPlace, PipelineSpec, RunAddress]:
    """The flags of the rank entry point and torchrun's environment.

    Raises:
        UserError: a flag is wrong, or the number of processes is not stages + 1.
    """
    parser = argparse.ArgumentParser(prog="torchrun … -m pipedec.engine.rank", description=__doc__)
    parser.add_argument("--redis", help="redis://:password@host:port/0; default: $PIPEDEC_REDIS_URL")
    parser.add_argument("--run", default="default", help="name of the run; several runs may share a Redis")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--groups", type=int, help="groups of stages that share a timestep slot; default: one per stage")
    parser.add_argument("--layers", help="layers of each stage, like 6,6,6,6; default: even")
    parser.add_argument("--target", type=Path, help="checkpoint directory; default: the shipped pair")
    parser.add_argument("--draft", help="checkpoint directory, or none")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--transport", default="auto", choices=("auto", "gloo", "nccl"))
    flags = parser.parse_args(arguments)
    redis_url = redis_url_from_environment(flags.redis)
    if redis_url is None:
        raise UserError("torchrun ranks need a Redis that all hosts reach: give --redis URL or set PIPEDEC_REDIS_URL")
    layers = [int(count) for count in flags.layers.split(",")] if flags.layers else None
    spec = PipelineSpec.create(
        flags.target, flags.draft, flags.stages, flags.groups, layers=layers, dtype=flags.dtype, device=flags.device
    )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name not in os.environ for name in names):
        raise UserError("start this module with torchrun, or use pipedec up on one machine")
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names)
    if world_size != spec.num_stages + 1:
        raise UserError(
            f"{world_size} processes, but {spec.num_stages} stages and the draft rank make {spec.num_stages + 1}: "
            f"let --nnodes × --nproc-per-node be {spec.num_stages + 1}, or change --stages"
        )
    place = RankPlace(rank, world_size, local_rank, local_world_size, "env://", flags.transport)
    return place, spec, RunAddress(redis_url, flags.run)


def _print_report(rank: int) -> Report:
    def report(what: str, done: int, total: int) -> None:
        if done == total:
            print(f"pipedec rank {rank}: {what} done", file=sys.stderr, flush=True)

    return report


if __name__ == "__main__":
    main()
