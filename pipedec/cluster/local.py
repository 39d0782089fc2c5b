"""A resident cluster on this machine: one process per rank, and an embedded Redis unless one is given.

All of them end with this process, however it ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from pipedec.cluster.entry import run_rank
from pipedec.cluster.place import RankPlace, RunAddress
from pipedec.cluster.processes import RankProcesses, run_apart
from pipedec.cluster.watched import WatchedCluster
from pipedec.config import Settings
from pipedec.core.errors import UserError
from pipedec.plan.spec import PipelineSpec


def resolve_apart(settings: Settings) -> PipelineSpec:
    """Resolve these settings without loading torch into this process. Raises UserError as ``engine.build.resolve``."""
    return run_apart(_resolve, settings)


def _resolve(settings: Settings) -> PipelineSpec:
    from pipedec.engine.build import resolve  # in a process that has loaded torch

    return resolve(settings)


class LocalCluster(WatchedCluster):
    """All ranks of a pipeline on this machine, and a Redis of its own unless the settings name one. ``run_id`` is the name of the
    run; None for a random one.
    """

    def __init__(self, spec: PipelineSpec, run_id: str | None = None) -> None:
        if spec.emulation is not None and spec.settings.passage > spec.topology.num_groups:
            raise UserError("processes that emulate slow links have no timesteps in flight on them: use --clock computed")
        self._ranks_here = RankProcesses()
        super().__init__(spec.topology, spec.settings, run_id or f"local-{secrets.token_hex(4)}", self._ranks_here)
        self.spec = spec
        self._timestep_ms = spec.emulation.timestep_ms if spec.emulation else 0.0

    def _start_rank(self, rank: int) -> None:
        world_size = len(self.topology.ranks)
        place = RankPlace(rank, world_size, rank, world_size, recovers=self.settings.cluster.recovers)
        self._ranks_here.start(rank, serve_rank, place, self.spec, self.address)


def serve_rank(place: RankPlace, spec: PipelineSpec, address: RunAddress, report: Callable[[tuple[str, int, int]], None]) -> int:
    """Serve in a rank's process; returns its exit status. Its reports are not read once the cluster is up."""
    return run_rank(place, spec.topology, lambda: spec, address, lambda *contents: report(contents))
