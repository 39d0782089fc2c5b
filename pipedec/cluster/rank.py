"""One rank of a resident cluster, from process start to process end.

Owns the order of a rank's start (meet the others, load its own weights, report that it is alive, serve) and of its end. What
becomes of a failure is for ``entry``.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pipedec.cluster.address import RankPlace, Report
from pipedec.cluster.clock import measured_offset_us
from pipedec.cluster.lease import LEASE_RENEWAL_SECONDS, LeaseKeeper
from pipedec.cluster.meeting import Meeting
from pipedec.cluster.place import check_device, checked_host
from pipedec.core import PipedecError, RankLost
from pipedec.engine.draft_loop import DraftLoop
from pipedec.engine.rank_tasks import Wiring
from pipedec.engine.sequences import Sequences
from pipedec.engine.spec import PipelineSpec, num_gpus
from pipedec.engine.stage_loop import StageLoop
from pipedec.messages import Choice, LoadedEvent, RankDescription, load_validators
from pipedec.model import ModelConfig, attention_backend
from pipedec.scheduler import STARTING, RedisScheduler
from pipedec.topology import rank_name
from pipedec.tracing import Tracer
from pipedec.transport.rendezvous import Store
from pipedec.transport.torch_distributed import TorchTransport

LOADING_SECONDS = 3600.0
_LARGE_OFFSET_US = 1_000_000


@dataclass(frozen=True)
class _Joined:
    """A rank that has met the others: its host, its device, and how it sends.

    Attributes:
        backend: of ``transport``.
        digests: see ``Met``.
    """

    host: str
    device: torch.device
    transport: TorchTransport
    backend: Choice
    interface: Choice
    digests: Mapping[str, str]


def serve(
    place: RankPlace, spec: PipelineSpec, scheduler: RedisScheduler, report: Report, store: Store | None,
    describe: Callable[[RankDescription], None],
) -> None:  # fmt: skip
    """Serve as one rank until the run is stopped. For the arguments see ``run_rank``.

    Raises:
        PipedecError: this rank cannot serve, or another one has failed.
    """
    share = (os.cpu_count() or 1) // place.local_world_size
    torch.set_num_threads(max(1, min(share, torch.get_num_threads())))  # OMP_NUM_THREADS may ask for fewer
    lease = LeaseKeeper(scheduler, place.rank)
    lease.start()  # before the meeting: digests of large checkpoints may take longer than the run's keys live without it
    joined = _join(place, spec, scheduler, report, store)
    load_validators()  # not while the first request waits
    clock_offset_us = measured_offset_us(scheduler.clock_us)
    loop = _load(place, spec, joined, scheduler, report, clock_offset_us)
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector, which halts a timestep, need not look at it again
    description = _description(place.rank, spec, joined, clock_offset_us)
    describe(description)
    scheduler.publish(STARTING, LoadedEvent(description))
    if place.rank == 0:
        ranks = _wait_for_ranks(scheduler, place.world_size)
        scheduler.open(spec.description(ranks, joined.digests), spec.duplex)
        report("ready", 1, 1)
    loop.run()
    lease.stop()
    if place.rank == 0:
        _wait_for_leavers(scheduler)
        scheduler.clear()
    joined.transport.close()


def _join(place: RankPlace, spec: PipelineSpec, scheduler: RedisScheduler, report: Report, store: Store | None) -> _Joined:
    """Compare this place with the plan, meet the other ranks, and connect to them."""
    host = checked_host(place, spec.places, spec.servers)
    device = spec.rank_device(place.rank, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    check_device(place, spec, device)
    wanted = chosen_backend(place, spec, num_gpus())
    with Meeting(scheduler, place, host, spec, store).hold(lambda done, total: report("checking", done, total)) as met:
        hidden_size = ModelConfig.from_directory(spec.target).hidden_size
        transport = TorchTransport(wanted.name, met.rendezvous, hidden_size, spec.torch_dtype, device)
    backend = wanted
    if transport.backend != wanted.name:
        why = "another stage has no GPU of its own" if place.rank else "messages from and to rank 0 go through host memory"
        backend = Choice(transport.backend, why)
    return _Joined(host, device, transport, backend, Choice(met.interface.name, met.interface.why), met.digests)


def _description(rank: int, spec: PipelineSpec, joined: _Joined, clock_offset_us: int) -> RankDescription:
    """What users are told of this rank."""
    device = torch.cuda.get_device_name(joined.device) if joined.device.type == "cuda" else "cpu"
    attention = Choice(*attention_backend(spec.torch_dtype, joined.device))
    remarks = _clock_remarks(clock_offset_us)
    return RankDescription(rank, joined.host, device, spec.dtype, joined.backend, joined.interface, attention, remarks)


def _clock_remarks(offset_us: int) -> tuple[str, ...]:
    if abs(offset_us) < _LARGE_OFFSET_US:
        return ()
    return (f"its clock is {abs(offset_us) / 1e6:.0f} s {'behind' if offset_us > 0 else 'ahead of'} Redis's: run NTP",)


def chosen_backend(place: RankPlace, spec: PipelineSpec, gpus: int) -> Choice:
    """NCCL if every rank of this host that needs a GPU (all but a rank 0 without a draft) has one of its own, else gloo.

    Without a plan the ranks of a host are consecutive, so rank 0 is on this host if this rank equals its local rank.

    Args:
        gpus: GPUs of this host.
    """
    if place.transport != "auto":
        return Choice(place.transport, "as --transport says")
    if spec.rank_device(place.rank, place.local_rank, gpus).type != "cuda":
        return Choice("gloo", "NCCL needs GPUs")
    without_gpu = 1 if spec.draft is None and place.rank == place.local_rank else 0
    if spec.places is None and gpus < place.local_world_size - without_gpu:
        return Choice("gloo", f"{place.local_world_size} ranks share {gpus} GPUs of this host")
    return Choice("nccl", "every stage has a GPU of its own")


def _load(
    place: RankPlace, spec: PipelineSpec, joined: _Joined, scheduler: RedisScheduler, report: Report, clock_offset_us: int
) -> DraftLoop | StageLoop:
    def progress(done: int, total: int) -> None:
        report("loading", done, total)

    tracer = Tracer(place.rank, clock_offset_us=clock_offset_us)
    sequences = Sequences(spec.target)
    device = joined.device
    wiring = Wiring(
        scheduler, joined.transport, spec.topology, tracer, sequences, device, spec.emulation, spec.window, spec.duplex
    )
    if place.rank == 0:
        prompter, drafter, masks = spec.load_prompter(), spec.load_drafter(device, progress), spec.trained_masks()
        return DraftLoop(prompter, drafter, masks, wiring, spec.tree, spec.max_num_seqs, spec.knee, spec.kv_manager())
    return StageLoop(spec.load_stage(place.rank, device, progress), place.rank, wiring)


def _wait_for_ranks(scheduler: RedisScheduler, world_size: int) -> list[RankDescription]:
    """Rank 0 waits until every rank has loaded its weights, and describes itself; then it opens the run."""
    deadline = time.monotonic() + LOADING_SECONDS
    found: dict[int, RankDescription] = {}
    position = "0"
    while len(found) < world_size:
        events = scheduler.read_answer(STARTING, position, LEASE_RENEWAL_SECONDS)
        position = events[-1][0] if events else position
        found |= {event.description.rank: event.description for _, event in events if isinstance(event, LoadedEvent)}
        if time.monotonic() > deadline:
            missing = ", ".join(rank_name(rank) for rank in range(world_size) if rank not in found)
            raise RankLost(f"{missing} did not load the weights within {LOADING_SECONDS:.0f} s")
        if failure := scheduler.failure():
            raise PipedecError(failure)
        if lost := scheduler.expired_ranks():
            raise RankLost(f"{', '.join(map(rank_name, lost))} stopped answering while it loaded its weights")
    scheduler.close_answer(STARTING)
    return [found[rank] for rank in sorted(found)]


def _wait_for_leavers(scheduler: RedisScheduler) -> None:
    """Rank 0 waits until the other ranks have left, because it deletes the run's keys; ranks that never leave have died."""
    deadline = time.monotonic() + 10.0
    while scheduler.members() and time.monotonic() < deadline:
        time.sleep(0.02)
