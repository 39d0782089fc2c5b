"""A resident cluster on this machine: an embedded Redis and one process per rank, started and ended together.

Ranks and Redis end with this process, however it ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from pipedec.cluster.address import RankPlace, RunAddress
from pipedec.cluster.entry import run_rank
from pipedec.cluster.processes import RankProcesses
from pipedec.cluster.supervisor import Supervisor
from pipedec.engine.spec import PipelineSpec
from pipedec.scheduler import EmbeddedServer


class LocalCluster(Supervisor):
    """All ranks of a pipeline on this machine. Use as a context manager, or ``start`` and ``stop``.

    Args:
        redis_url: an existing server; None starts one that belongs to this cluster.
        run_id: name of the run; None for a random one.
        transport: ``gloo``, ``nccl``, or ``auto``.
    """

    def __init__(
        self, spec: PipelineSpec, redis_url: str | None = None, run_id: str | None = None, transport: str = "auto"
    ) -> None:
        self._processes = RankProcesses()
        super().__init__(spec.topology, run_id or f"local-{secrets.token_hex(4)}", self._processes)
        self.spec = spec
        self._given_url = redis_url
        self._transport = transport
        self._server: EmbeddedServer | None = None

    def _open_redis(self) -> str:
        if self._given_url is not None:
            return self._given_url
        self._server = EmbeddedServer()
        return self._server.url

    @property
    def _owns_redis(self) -> bool:
        return self._server is not None

    def _start_ranks(self) -> None:
        world_size = self.spec.num_stages + 1
        for rank in range(world_size):
            place = RankPlace(rank, world_size, rank, world_size, self._transport)
            self._processes.start(rank, _serve_rank, place, self.spec, self.address)

    def _close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


def _serve_rank(place: RankPlace, spec: PipelineSpec, address: RunAddress, report: Callable[[tuple[str, int, int]], None]) -> int:
    """What a rank's process runs; returns its exit status. Nobody reads its reports once the cluster is up."""
    return run_rank(place, spec.topology, lambda: spec, address, lambda *told: report(told))
