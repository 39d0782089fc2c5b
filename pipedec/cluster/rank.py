"""One rank of a resident cluster, from process start to process end.

Owns the order of a rank's start (meet the others, load its own weights, report that it is alive, serve) and of its end.
Started by torchrun on every host (``cluster/torchrun.py``), or by ``LocalCluster`` on one machine.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipedec.cluster.address import RunAddress
from pipedec.cluster.lease import LEASE_RENEWAL_SECONDS, LeaseKeeper
from pipedec.core import PipedecError, RankLost
from pipedec.engine.draft_loop import DraftLoop
from pipedec.engine.rank_tasks import Wiring
from pipedec.engine.sequences import Sequences
from pipedec.engine.spec import PipelineSpec, num_gpus
from pipedec.engine.stage_loop import StageLoop
from pipedec.messages import LoadedEvent, load_validators
from pipedec.model import ModelConfig
from pipedec.scheduler import RedisScheduler, Scheduler
from pipedec.tracing import Tracer
from pipedec.transport import Transport
from pipedec.transport.torch_distributed import Rendezvous, TorchTransport

MEETING_SECONDS = 120.0
LOADING_SECONDS = 3600.0
STARTING = -1  # the answer stream, of no request, on which ranks report that they have loaded their weights

Report = Callable[[str, int, int], None]  # what the rank does, how many units are done, how many there are


@dataclass(frozen=True)
class RankPlace:
    """Which rank this process is, and where it meets the others."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str
    transport: str = "auto"


def run_rank(place: RankPlace, spec: PipelineSpec, address: RunAddress, report: Report) -> int:
    """Serve as one rank until the run is stopped; returns the exit status.

    A failure is reported to the other ranks and to clients that wait for an answer, then printed in one line. The caller should
    end the process by ``os._exit``: a process group that has lost a peer can hang in its own clean-up.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_world_size))
    scheduler: RedisScheduler | None = None
    try:
        scheduler = address.scheduler(spec.topology)
        _serve(place, spec, scheduler, report)
        return 0
    except PipedecError as error:
        message = str(error).removeprefix(f"rank {place.rank} ")
    except Exception as error:
        traceback.print_exc()
        message = f"internal error: {type(error).__name__}: {error}"
    _notify_others(scheduler, place.rank, message)
    print(f"pipedec rank {place.rank}: {message}", file=sys.stderr, flush=True)
    return 1


def _serve(place: RankPlace, spec: PipelineSpec, scheduler: RedisScheduler, report: Report) -> None:
    device = spec.rank_device(place.rank, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    transport = _meet(place, spec, device)
    lease = LeaseKeeper(scheduler, place.rank)
    lease.start()
    load_validators()  # not while the first request waits
    loop = _load(place, spec, device, scheduler, transport, report)
    scheduler.publish(STARTING, LoadedEvent(place.rank))
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
    backend = chosen_backend(place, spec, num_gpus()) if place.transport == "auto" else place.transport
    rendezvous = Rendezvous(place.rank, place.world_size, place.init_method, MEETING_SECONDS)
    hidden_size = ModelConfig.from_directory(spec.target).hidden_size
    return TorchTransport(backend, rendezvous, hidden_size, spec.torch_dtype, device)


def chosen_backend(place: RankPlace, spec: PipelineSpec, gpus: int) -> str:
    """NCCL if every rank of this host that needs a GPU (all but a rank 0 without a draft) has one of its own, else gloo.

    The ranks of a host are consecutive, so rank 0 is on this host if this rank equals its local rank. A CPU uses gloo.

    Args:
        gpus: GPUs of this host.
    """
    without_gpu = 1 if spec.draft is None and place.rank == place.local_rank else 0
    is_on_gpu = spec.rank_device(place.rank, place.local_rank, gpus).type == "cuda"
    return "nccl" if is_on_gpu and gpus >= place.local_world_size - without_gpu else "gloo"


def _load(
    place: RankPlace, spec: PipelineSpec, device: torch.device, scheduler: RedisScheduler, transport: Transport, report: Report
) -> DraftLoop | StageLoop:
    def progress(done: int, total: int) -> None:
        report("loading", done, total)

    tracer = Tracer(place.rank, clock_offset_us=_clock_offset_us(scheduler))
    sequences = Sequences(spec.target)
    wiring = Wiring(scheduler, transport, spec.topology, tracer, sequences, device, spec.emulation, spec.window)
    if place.rank == 0:
        drafter = spec.load_drafter(device, progress)
        return DraftLoop(spec.load_prompter(), drafter, spec.trained_masks(), wiring, spec.tree)
    return StageLoop(spec.load_stage(place.rank, device, progress), place.rank, wiring)


def _clock_offset_us(scheduler: RedisScheduler) -> int:
    """Redis's clock minus this host's, from the fastest of several round trips (a slow one is imprecise)."""
    samples = []
    for _ in range(8):
        before_us = time.time_ns() // 1000
        theirs_us = scheduler.clock_us()
        after_us = time.time_ns() // 1000
        samples.append((after_us - before_us, theirs_us - (before_us + after_us) // 2))
    return min(samples)[1]


def _wait_for_ranks(scheduler: RedisScheduler, world_size: int) -> None:
    """Rank 0 waits until every rank has loaded its weights; then it opens the run."""
    deadline = time.monotonic() + LOADING_SECONDS
    missing, position = set(range(world_size)), "0"
    while missing:
        events = scheduler.read_answer(STARTING, position, LEASE_RENEWAL_SECONDS)
        position = events[-1][0] if events else position
        missing -= {event.rank for _, event in events if isinstance(event, LoadedEvent)}
        if time.monotonic() > deadline:
            raise RankLost(f"ranks {sorted(missing)} have not loaded their weights within {LOADING_SECONDS:.0f} s")
        if failure := scheduler.failure():
            raise PipedecError(failure)
        if lost := scheduler.expired_ranks():
            raise RankLost(f"{', '.join(f'rank {rank}' for rank in lost)} stopped answering while it loaded its weights")
    scheduler.close_answer(STARTING)


def _wait_for_leavers(scheduler: RedisScheduler) -> None:
    """Rank 0 waits until the other ranks have left, because it deletes the run's keys; ranks that never leave have died."""
    deadline = time.monotonic() + 10.0
    while scheduler.members() and time.monotonic() < deadline:
        time.sleep(0.02)


def _notify_others(scheduler: Scheduler | None, rank: int, message: str) -> None:
    if scheduler is None:
        return
    try:
        scheduler.abort(rank, message)
    except PipedecError:
        print(f"pipedec rank {rank}: could not notify the other ranks", file=sys.stderr, flush=True)
