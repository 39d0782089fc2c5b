"""One rank of a resident cluster, from process start to process end.

Owns the order of a rank's start (meet the others, load its own weights, warm up, report that it can serve, serve), how it
continues in the next epoch when another rank, or Redis, is lost, and the order of its end. ``entry`` handles failures.
"""

from __future__ import annotations

import atexit
import gc
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from pipedec.checkpoints import check_here
from pipedec.checkpoints.download import fetch
from pipedec.cluster.lease import RECOVERY_SECONDS, LeaseKeeper, next_epoch
from pipedec.cluster.meeting import Meeting, Met, RankMemory
from pipedec.cluster.network import measured_offset_us
from pipedec.cluster.place import RankPlace, Report, checked_host
from pipedec.cluster.processes import leave
from pipedec.config import AUTO
from pipedec.core.errors import EpochEnded, PipedecError, RankLost, SchedulerLost, UserError
from pipedec.core.limits import DRAFT_KNEE
from pipedec.decoding import Drafter
from pipedec.device import device_of
from pipedec.drafting import DraftModel
from pipedec.engine.activity import Activity
from pipedec.engine.build import DTYPES, Progress, load_drafter, load_prompter, load_stage, weights_on
from pipedec.engine.devices import allocated, limit_threads, num_gpus, rank_device, widened_weights
from pipedec.engine.draft_loop import DraftLoop
from pipedec.engine.experience_files import KeptExperience
from pipedec.engine.rank_loops import draft_loop, wired
from pipedec.engine.rank_tasks import Wiring
from pipedec.engine.stage_loop import StageLoop
from pipedec.families import model_config
from pipedec.hardware import DEVICES
from pipedec.live.feed import LiveFeed, about
from pipedec.messages.run import Choice, LinkSpeed, RankDescription
from pipedec.model import Usual, choose_kernels, described_attention, device_capture
from pipedec.model.captured_graphs import Capture, Run
from pipedec.plan.budgets import kv_slots
from pipedec.plan.spec import PipelineSpec, run_description
from pipedec.scheduler import RankScheduler
from pipedec.stage import StageWorker
from pipedec.topology import rank_name
from pipedec.tracing import Tracer
from pipedec.transport.torch_distributed import TorchTransport

logger = logging.getLogger(__name__)

_SURVIVED = (RankLost, EpochEnded, SchedulerLost)  # end an epoch, but not this process
_LARGE_OFFSET_US = 1_000_000


class Rank:
    """A process that takes part in one epoch of the run after another, and loads its weights once. Owns the rank's scheduler
    lease, transport and loop.

    For the arguments see ``run_rank``. Raises UserError if this host, its checkpoints or its GPU do not suit the rank.
    """

    def __init__(
        self, place: RankPlace, spec: PipelineSpec, scheduler: RankScheduler, report: Report,
        describe: Callable[[RankDescription], None],
    ) -> None:  # fmt: skip
        limit_threads(place.local_world_size)
        scheduler.enter(scheduler.current_epoch() or 0)
        self._place = replace(place, host=checked_host(place, spec.places, spec.servers))
        self._spec, self._scheduler = spec, scheduler
        self._report, self._describe = report, describe
        self._name = f"{rank_name(place.rank)} on {self._place.host}"
        self._device = rank_device(spec, place.rank, place.local_rank)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        check_device(place, spec, self._device)
        self._wanted = chosen_backend(place, spec, num_gpus())
        hidden_size = model_config(spec.target).hidden_size
        self._streams = device_of(self._device)
        wire_dtype = None if spec.settings.cluster.wire_dtype == AUTO else torch.int8
        self._transport = TorchTransport(
            self._wanted.name, place.rank, hidden_size, DTYPES[spec.dtype], self._device, self._streams, depth=spec.link_depth,
            wire_dtype=wire_dtype,
        )  # fmt: skip
        self._activity = Activity()
        self._lease = LeaseKeeper(scheduler, self._place, self._activity, self._transport)
        self._memory = RankMemory(spec, self._place, self._device)
        self._meeting = Meeting(scheduler, self._place, spec, self._memory, self._activity, self._transport.versions)
        self._digests: Mapping[str, str] = {}  # by model, if ranks on several hosts have compared them
        self._first_epoch = scheduler.epoch
        # Whether requests wait for this process, which can serve without its draft model.
        self._loads_late = place.rank == 0 and scheduler.epoch > 0 and spec.draft is not None
        self._clock_offset_us = 0
        self._loop: DraftLoop | StageLoop | None = None  # once the weights are loaded
        self._cold: StageWorker | DraftModel | None = None  # loaded, and not warmed up yet
        self._has_served = False
        self._apart: float | None = None  # since when it has tried to meet the others again, by ``_meeting_seconds``

    def serve(self) -> None:
        """Serve in any number of epochs until the run is stopped. Raises PipedecError if this rank, or a lost one, ends it."""
        self._activity.meet_again()
        self._lease.start()  # before the download and the meeting, which may take longer than the run's keys live
        self._activity.begin("loading")
        parts = self._spec.parts(self._place.rank)
        fetch(parts, partial(self._report, "downloading"))
        check_here(parts, self._name)
        while True:
            try:
                self._take_part().serve(self._transport)
                break
            except PipedecError as error:
                if not self._place.recovers:
                    raise
                if not isinstance(error, _SURVIVED) and self._scheduler.current_epoch() == self._scheduler.epoch:
                    raise  # the epoch has not ended, and this is no consequence of that
                self._outlive(error)
        self._lease.stop()
        if self._place.rank == 0:
            deadline = time.monotonic() + 10.0  # for the other ranks to leave; those that never do have died
            while ((status := self._scheduler.status()).alive or status.expired) and time.monotonic() < deadline:
                time.sleep(0.02)
            self._scheduler.clear()
        self._transport.close()

    def _take_part(self) -> DraftLoop | StageLoop:
        """Meet and connect to the others; load the weights and warm up if that is not done. Returns the loop, ready to serve."""

        def warming(done: int, total: int) -> None:
            self._activity.begin("warming")
            self._report("warming", done, total)

        self._activity.begin("meeting")
        with self._meeting.hold() as met:
            if self._place.has_others_elsewhere and not self._has_served:
                self._report("digests", met.own, 0)
            self._transport.join(met.rendezvous)
        self._spec, self._digests = replace(self._spec, agreed_slots=met.kv_slots), met.digests
        backend = self._wanted
        if self._transport.backend != backend.name:
            others = "another stage has no GPU of its own"
            why = others if self._place.rank else "messages from and to rank 0 go through host memory"
            backend = Choice(self._transport.backend, why)
        logger.info("connected to the other ranks over %s (%s), interface %s", backend.name, backend.why, met.interface.name)
        link = None if met.is_alone else self._transport.measured_link()
        self._activity.link_seconds = 0.0 if link is None else link.latency_seconds
        if link is not None:
            logger.info("to rank %d: %s", self._spec.topology.following(self._place.rank), link)
        self._apart = None
        loop = self._loop = self._loop or self._load()
        if self._cold is not None:
            began = time.monotonic()
            self._cold.warm_up(self._usual, warming)
            logger.info("warmed up in %.1f s", time.monotonic() - began)
            self._cold = None
        description = self._description(met, backend, link)
        if not self._has_served:
            self._describe(description)
            logger.info("on %s: %s", self._place.host, description)
        self._lease.settle()
        self._meeting.loaded(description)
        if self._place.rank == 0:  # declares the run up when all ranks can serve
            ranks = self._meeting.wait_for_all()
            run = run_description(self._spec, ranks, met.digests)
            assert isinstance(loop, DraftLoop)
            loop.set_ring_latency(run.ring_latency_seconds)
            self._scheduler.open(run, self._spec.duplex, self._place.recovers)
            logger.info("all %d ranks can serve: the run takes requests", len(ranks))
            self._report("ready", 1, 1)
        self._has_served = True
        return loop

    def _load(self) -> DraftLoop | StageLoop:
        self._activity.begin("loading")
        self._clock_offset_us = measured_offset_us(self._scheduler.clock_us)
        began, loading = time.monotonic(), partial(self._report, "loading")
        loop = self._load_stage(loading) if self._place.rank > 0 else self._load_draft(loading)
        self._memory.gpu = ""  # from now on its memory is taken
        logger.info(
            "loaded in %.1f s: %d KV slots, knee %d rows", time.monotonic() - began, kv_slots(self._spec), self._spec.knee
        )
        gc.collect()
        gc.freeze()  # exclude loaded objects from garbage collection, which halts a timestep
        atexit.register(gc.unfreeze)  # Triton's library else reports objects that are left at the end
        return loop

    def _load_stage(self, loading: Progress) -> StageLoop:
        load = partial(load_stage, self._spec, self._place.rank, self._device, loading, self._timed_capture)
        self._cold = worker = allocated(load, self._name)
        return StageLoop(worker, self._place.rank, self._wiring())

    def _load_draft(self, loading: Progress) -> DraftLoop:
        drafter = None
        if not self._loads_late:
            drafter = allocated(partial(load_drafter, self._spec, self._device, loading, self._timed_capture), self._name)
        self._cold, prompter = drafter, load_prompter(self._spec)
        make_feed = partial(LiveFeed, about(self._spec, self._scheduler.run_id), prompter.text)
        kept = KeptExperience(self._spec, self._device, self._digests)
        load_late = self._load_late if self._loads_late else None
        return draft_loop(self._spec, self._wiring(), prompter, kept, drafter, load_late, make_feed)

    def _wiring(self) -> Wiring:
        tracer = Tracer(self._place.rank, clock_offset_us=self._clock_offset_us)
        return wired(self._spec, self._scheduler, self._transport, tracer, self._activity, self._device, self._streams)

    def _load_late(self) -> Drafter:
        """Load the draft model; runs in a thread of its own."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # it is set per thread
        drafter = allocated(lambda: load_drafter(self._spec, self._device, capture=self._timed_capture), self._name)
        assert drafter is not None
        drafter.warm_up(self._usual)
        return drafter

    @property
    def _usual(self) -> Usual:
        return Usual(self._spec.knee if self._place.rank > 0 else DRAFT_KNEE, self._spec.max_context)

    def _timed_capture(self, device: torch.device) -> Capture | None:
        """The device's capture of forwards, each of which counts as warming up whenever it happens; None if it has none."""
        if (capture := device_capture(device)) is None:
            return None

        def timed(run: Run) -> Run:
            with self._activity.warming():
                began = time.monotonic()
                captured = capture(run)
                logger.debug("captured a forward in %.2f s", time.monotonic() - began)
                return captured

        return timed

    def _description(self, met: Met, backend: Choice, link: LinkSpeed | None) -> RankDescription:
        """The description of this rank for users."""
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        weights, why = weights_on(self._spec, self._place.rank, self._device)
        dequantize = self._spec.settings.numbers.dequantize
        dtype = DTYPES[weights.dtype]
        why_kernels = choose_kernels(self._spec.settings.numbers.kernels, self._device, dtype)
        attention = Choice(*described_attention(dtype, self._device, why_kernels))
        config = self._spec.config_of(self._place.rank)
        remarks: tuple[str, ...] = () if config is None else config.formats.notes
        if abs(offset := self._clock_offset_us) >= _LARGE_OFFSET_US:
            order = "behind" if offset > 0 else "ahead of"
            remarks += (f"its clock is {abs(offset) / 1e6:.0f} s {order} Redis's: run NTP",)
        return RankDescription(
            self._place.rank, str(self._place.host), device,
            dtype=Choice(str(weights), why),
            transport=backend,
            interface=Choice(met.interface.name, met.interface.why),
            attention=attention,
            remarks=remarks,
            since_epoch=self._first_epoch,
            link=link,
            weights=None if config is None else widened_weights(config, weights.dtype, self._device, dequantize)[1],
        )  # fmt: skip

    @property
    def _meeting_seconds(self) -> float:
        """A monotonic clock that stands still while this rank waits for others that load."""
        return time.monotonic() - self._meeting.loading_seconds

    def _outlive(self, error: PipedecError) -> None:
        """The epoch has ended, or will: wait for the next one and enter it, or end this process if its transport cannot rejoin.
        Raises RankLost if there is no next epoch, the run has failed, the ranks do not meet, or this process cannot go on.
        """
        logger.warning("epoch %d is over: %s", self._scheduler.epoch, error)
        self._transport.abort()
        now = self._meeting_seconds
        self._apart = now if self._apart is None else self._apart
        if self._has_served and isinstance(error, RankLost) and now > self._apart + RECOVERY_SECONDS:  # no rank was lost
            message = f"{error}; the ranks could not meet again for {RECOVERY_SECONDS:.0f} s"
            with suppress(EpochEnded):  # one was lost after all
                with suppress(SchedulerLost):
                    self._scheduler.abort(self._place.rank, message)
                raise RankLost(message)
        if not self._has_served and self._scheduler.current_epoch() is None:
            raise error  # the run is not up yet: lost ranks are not replaced
        if not self._transport.can_rejoin:
            with suppress(PipedecError):
                self._scheduler.suspect(self._place.rank, str(error))
            leave()
        if not self._place.survives:
            raise RankLost(f"left with the other ranks: {error}")
        self._transport.close()
        while True:
            epoch = next_epoch(self._scheduler, self._place.rank, error)
            with suppress(*_SURVIVED):  # it has ended before this rank could enter it
                self._lease.enter(epoch)
                logger.info("takes part in epoch %d", epoch)
                return


def check_device(place: RankPlace, spec: PipelineSpec, device: torch.device) -> None:
    """Raises UserError if the GPU of this rank is of another kind than the plan's, or smaller."""
    if spec.places is None or device.type != "cuda":
        return
    found = torch.cuda.get_device_properties(device)
    planned = spec.places[place.rank]
    if difference := DEVICES[planned.device].difference(found.name, found.total_memory):
        raise UserError(f"{rank_name(place.rank)} on {planned.host}: GPU #{planned.index} is {difference}: correct its devices")


def chosen_backend(place: RankPlace, spec: PipelineSpec, gpus: int) -> Choice:
    """NCCL if every stage of this host has one of its ``gpus`` to itself, else gloo. Rank 0 does not count: it may share a GPU.

    Without a plan the ranks of a host are consecutive, so rank 0 is on this host if this rank equals its local rank.
    """
    if (given := spec.settings.cluster.transport) != AUTO:
        return Choice(given, "as given")
    if rank_device(spec, place.rank, place.local_rank, gpus).type != "cuda":
        return Choice("gloo", "NCCL needs GPUs")
    stages = place.local_world_size - (1 if place.rank == place.local_rank else 0)
    if spec.places is None and gpus < stages:
        return Choice("gloo", f"{stages} stages share {gpus} GPUs of this host")
    return Choice("nccl", "every stage has a GPU of its own")
