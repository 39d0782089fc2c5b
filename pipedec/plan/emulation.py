"""Emulated clusters: real processes and real tokens whose work lasts as long as it would on given devices and links.

Owns how long each rank's work should last, from the plan of a cluster; ``engine.emulation`` waits for that time or adds it up.
Verdicts, rank 0's own work and Redis are not emulated: they take their real time on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from pipedec.config import AUTO, ClusterConfig, DeviceConfig, RedisConfig, ServerConfig
from pipedec.config.cluster import PartitionConfig
from pipedec.core.errors import UserError
from pipedec.core.stage_message import Load
from pipedec.plan.costs import RankTiming
from pipedec.plan.partition import Plan, whole_rows
from pipedec.plan.roofline import expected_ms

GPUS_PER_SERVER = 7


@dataclass(frozen=True)
class Emulation:
    """The emulated times of every rank of a pipeline.

    Attributes:
        slow_motion: every emulated time is stretched by this factor, so that the fixed cost of this machine weighs less.
            Benchmarks divide the times that they report by it.
        draft: rank 0; None without a draft model.
        duplex: of the links, ``half`` or ``full``. Counts for computed times; a real rank waits for what it sends alone.
        kv_tokens: tokens of all running requests together for which the devices have memory; None for no limit, as for devices
            that are too small even for the weights.
        kv_token_bytes: of one token in the KV caches of all ranks together.
        counts_own_work: computed times include rank 0's own work (all but the draft's forwards), as measured on this machine.
        shared_stage: the stage on whose device rank 0 computes; None if it has one of its own.
    """

    preset: str
    slow_motion: float
    draft: RankTiming | None
    stages: tuple[RankTiming, ...]
    duplex: str = "half"
    kv_tokens: int | None = None
    kv_token_bytes: int = 0
    counts_own_work: bool = True
    shared_stage: int | None = None

    def __post_init__(self) -> None:
        if not 0.1 <= self.slow_motion <= 1000:
            raise UserError(f"slow motion must be a factor between 0.1 and 1000, not {self.slow_motion}")

    @classmethod
    def of_plan(cls, plan: Plan, slow_motion: float = 1.0) -> Emulation:
        draft = plan.draft.timing if plan.draft else None
        stages = tuple(stage.timing for stage in plan.stages)
        token_bytes = sum(rank.token_bytes for rank in plan.kv.ranks)
        return cls(
            plan.partition, slow_motion, draft, stages, plan.duplex, None if plan.problems else plan.kv.tokens, token_bytes,
            shared_stage=plan.shared_stage,
        )  # fmt: skip

    def timing(self, rank: int) -> RankTiming | None:
        """The timing of a rank; None for rank 0 without a draft."""
        return self.draft if rank == 0 else self.stages[rank - 1]

    @property
    def ring_latency_seconds(self) -> float:
        """The latencies of all links together, from rank 0 through the stages and back."""
        return sum(timing.link.latency_us for timing in (self.draft, *self.stages) if timing is not None) / 1e6

    @property
    def timestep_ms(self) -> float:
        """Milliseconds of a timestep that fills the room, in slow motion."""
        load = Load(self.room)
        drafting_ms = self.draft.compute_ms(load) if self.draft else 0.0
        return self.slow_motion * max(drafting_ms, *(stage.compute_ms(load) + stage.send_ms(load.rows) for stage in self.stages))

    @property
    def room(self) -> int:
        """Rows that may enter at a timestep: up to the knee, or with experts as ``PassTime.room_rows`` says."""
        return whole_rows(stage.compute.room_rows for stage in self.stages)

    @cached_property
    def expected_ms(self) -> tuple[float, ...]:
        """As ``roofline.expected_ms``."""
        return expected_ms(stage.compute for stage in self.stages)


def with_stages(config: ClusterConfig, name: str, stages: int) -> ClusterConfig:
    """``config`` with its partition ``name`` cut anew: ``stages`` single-stage groups on devices like the partition's first one.

    Layers are balanced, and links between servers are alike. The plan says whether the layers fit into the devices' memory. A
    draft that shares a stage's device shares the last stage's.
    """
    name, partition = config.find_partition(name)
    if partition.devices:
        device = partition.devices[0].device
    else:
        first = next(server for server in config.servers if not partition.servers or server.host in partition.servers)
        device = next(iter(first.devices))
    servers = [
        ServerConfig(f"server-{index + 1}", {device: min(GPUS_PER_SERVER, stages - index * GPUS_PER_SERVER)})
        for index in range(ceil(stages / GPUS_PER_SERVER))
    ]
    draft_device = None
    if partition.draft_device is not None and partition.draft_device.shared:
        draft_device = DeviceConfig(servers[-1].host, device, shared=True)
    elif partition.draft_device is not None:
        servers.append(ServerConfig("draft-server", {partition.draft_device.device: 1}))
        draft_device = DeviceConfig("draft-server", partition.draft_device.device)
    hosts = tuple(server.host for server in servers if server.host != "draft-server")
    settings = partition.settings.replaced(stages=stages, groups=None, layers=AUTO, redis=RedisConfig())
    cut = PartitionConfig(settings, hosts, draft_device=draft_device)
    network = replace(config.network, links=())
    return replace(config, servers=tuple(servers), network=network, partitions={name: cut}, partition=name)
