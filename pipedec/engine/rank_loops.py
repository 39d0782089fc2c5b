"""Builds the loop of a rank of a cluster from its pipeline."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipedec.decoding import Drafter
from pipedec.device import Device
from pipedec.engine.activity import Activity
from pipedec.engine.admission import Admission
from pipedec.engine.build import new_scheduler
from pipedec.engine.draft_loop import DraftLoop, MakeFeed
from pipedec.engine.emulation import Pacer
from pipedec.engine.experience_files import KeptExperience
from pipedec.engine.rank_tasks import Wiring
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import RankScheduler
from pipedec.text.prompt import Prompter
from pipedec.threads.sequences import Sequences
from pipedec.tracing import Tracer
from pipedec.transport import Transport


def wired(
    spec: PipelineSpec, scheduler: RankScheduler, transport: Transport, tracer: Tracer, activity: Activity, place: torch.device,
    device: Device,
) -> Wiring:  # fmt: skip
    """The wiring of the rank of ``tracer``, whose model is on ``place``, of which ``device`` has the streams."""
    pacer = None if spec.emulation is None else Pacer(spec.emulation, tracer.rank, scheduler.run_id, device)
    return Wiring(
        scheduler, transport, spec.topology, tracer, Sequences(spec.target), place, pacer, spec.window,
        tunes_passage=spec.tunes_passage and spec.emulation is None, duplex=spec.duplex, activity=activity, device=device,
    )  # fmt: skip


def draft_loop(
    spec: PipelineSpec, wiring: Wiring, prompter: Prompter, kept: KeptExperience, drafter: Drafter | None,
    load_drafter: Callable[[], Drafter] | None = None, make_feed: MakeFeed | None = None,
) -> DraftLoop:  # fmt: skip
    """The loop of rank 0; the last two arguments are those of ``DraftLoop``."""
    limits, scheduler = spec.settings.limits, new_scheduler(spec, drafter, wiring.place, experience=kept.experience)
    stages, capacity = spec.topology.num_stages, scheduler.kv.capacity
    admission = Admission(prompter, wiring.sequences, stages, capacity, limits.tree, limits.shared_suffixes)
    return DraftLoop(wiring, admission, scheduler, limits.max_num_seqs, load_drafter, make_feed, kept.keep)
