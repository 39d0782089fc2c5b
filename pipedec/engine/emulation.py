"""Emulated clusters: real processes and real tokens whose work lasts as long as it would on given devices and links.

Owns how long each rank's work should last (from the plan of a cluster) and two ways to apply it: ``Pacer`` makes a real rank
sleep until that time is over; ``EmulatedClock`` adds the same times up without waiting, for a pipeline in one process. Prefill,
verdicts and Redis are not emulated: they take what they take here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any, Protocol

from torch import Tensor

from pipedec.config import ClusterConfig, DeviceConfig, PartitionConfig, ServerConfig
from pipedec.core import UserError
from pipedec.decoding import Beat, Drafter, ForestDrafter
from pipedec.drafting import DraftModel
from pipedec.engine.plan import Plan, RankTiming
from pipedec.hardware import Link, PassTime
from pipedec.scheduler.workflow import Topology
from pipedec.threads import Sequence
from pipedec.tree import Advance, Candidates, PredictionTree

GPUS_PER_SERVER = 7


@dataclass(frozen=True)
class Emulation:
    """What every rank of a pipeline pretends to be.

    Attributes:
        preset: the partition it comes from.
        slow_motion: every emulated time is stretched by this factor, so that the fixed cost of the machine at hand weighs
            less; figures are divided back by whoever reports them.
        draft: rank 0; None without a draft model.
        stages: ranks 1..n.
    """

    preset: str
    slow_motion: float
    draft: RankTiming | None
    stages: tuple[RankTiming, ...]

    def __post_init__(self) -> None:
        if not 0.1 <= self.slow_motion <= 1000:
            raise UserError(f"slow motion must be a factor between 0.1 and 1000, not {self.slow_motion}")

    @classmethod
    def of_plan(cls, plan: Plan, slow_motion: float = 1.0) -> Emulation:
        draft = plan.draft.timing if plan.draft else None
        return cls(plan.partition, slow_motion, draft, tuple(stage.timing for stage in plan.stages))

    def timing(self, rank: int) -> RankTiming | None:
        """The timing of a rank; None for rank 0 without a draft."""
        return self.draft if rank == 0 else self.stages[rank - 1]

    def prefill_ms(self, chunk_rows: list[int]) -> float:
        """A prompt by arithmetic: its first chunk through all stages, then the slowest stage for each further chunk."""
        if not chunk_rows:
            return 0.0
        times = [[stage.compute_ms(rows) + stage.send_ms(rows) for stage in self.stages] for rows in chunk_rows]
        return sum(times[0]) + sum(max(chunk) for chunk in times[1:])

    def description(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_description(cls, raw: dict[str, Any]) -> Emulation:
        draft = None if raw["draft"] is None else _timing(raw["draft"])
        return cls(raw["preset"], raw["slow_motion"], draft, tuple(_timing(stage) for stage in raw["stages"]))


def _timing(raw: dict[str, Any]) -> RankTiming:
    return RankTiming(PassTime(**raw["compute"]), Link(**raw["link"]), raw["row_bytes"])


def with_stages(config: ClusterConfig, name: str, stages: int) -> ClusterConfig:
    """``config`` with its partition ``name`` cut anew: ``stages`` single-stage groups on devices like the partition's first one.

    Layers are balanced; whether they fit into the devices' memory the plan says.
    """
    name, partition = config.find_partition(name)
    device = partition.devices[0].device if partition.devices else next(iter(_servers(config, partition)[0].devices))
    servers = [
        ServerConfig(f"server-{index + 1}", {device: min(GPUS_PER_SERVER, stages - index * GPUS_PER_SERVER)})
        for index in range(ceil(stages / GPUS_PER_SERVER))
    ]
    draft_device = None
    if partition.draft_device is not None:
        servers.append(ServerConfig("draft-server", {partition.draft_device.device: 1}))
        draft_device = DeviceConfig("draft-server", partition.draft_device.device)
    hosts = tuple(server.host for server in servers if server.host != "draft-server")
    cut = PartitionConfig(stages, servers=hosts, draft_device=draft_device)
    return replace(config, servers=tuple(servers), partitions={name: cut}, partition=name)


def _servers(config: ClusterConfig, partition: PartitionConfig) -> list[ServerConfig]:
    return [server for server in config.servers if not partition.servers or server.host in partition.servers]


class Pacer:
    """Makes one rank's work last as long as the emulated device's; without an emulation it does nothing.

    The real work counts towards that time; what is left of it is slept. Real computing that takes longer is an overrun, which
    must be told; a transfer that takes longer is part of the fixed cost of a timestep.
    """

    def __init__(self, emulation: Emulation | None, rank: int) -> None:
        self._emulation = emulation
        self._rank = rank
        self._overran = False

    @contextmanager
    def computing(self, rows: int) -> Iterator[None]:
        """Around one pass of ``rows`` rows through this rank's layers."""
        timing = self._emulation and self._emulation.timing(self._rank)
        end = self._end(timing.compute_ms(rows) if timing else 0.0)
        yield
        self._overran |= timing is not None and time.perf_counter() > end
        _sleep_until(end)

    @contextmanager
    def sending(self, source: int, rows: int) -> Iterator[None]:
        """Around the transfer of ``rows`` rows from rank ``source``, at either end."""
        end = self._sent_at(source, rows)
        yield
        _sleep_until(end)

    def delay_sending(self, rows: int) -> None:
        """Wait as long as ``rows`` rows are under way from this rank."""
        _sleep_until(self._sent_at(self._rank, rows))

    @property
    def is_emulating(self) -> bool:
        return self._emulation is not None

    def take_overran(self) -> bool:
        """Whether computing overran since this was asked last."""
        overran, self._overran = self._overran, False
        return overran

    def _sent_at(self, source: int, rows: int) -> float:
        timing = self._emulation and self._emulation.timing(source)
        return self._end(timing.send_ms(rows) if timing else 0.0)

    def _end(self, emulated_ms: float) -> float:
        slow_motion = self._emulation.slow_motion if self._emulation else 0.0
        return time.perf_counter() + emulated_ms * slow_motion / 1000


def _sleep_until(end: float) -> None:
    if (remaining := end - time.perf_counter()) > 0:
        time.sleep(remaining)


@dataclass
class TimestepLoad:
    """What every rank had to do in one timestep: rows drafted forward by forward, computed and sent by rank."""

    drafted: list[int] = field(default_factory=list)
    computed: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)


class EmulatedClock:
    """Adds up what timesteps last: the slowest group or the draft, then the rank that sends and receives longest.

    A rank takes part in one transfer at a time (Algorithm 2), so its sending and its receiving add up.
    """

    def __init__(self, emulation: Emulation, topology: Topology) -> None:
        self._emulation = emulation
        self._topology = topology
        self.total_ms = 0.0

    def add(self, load: TimestepLoad) -> Beat:
        """Another timestep; returns what rank 0 would measure of it."""
        timestep_ms = self._compute_ms(load) + self._transfer_ms(load)
        self.total_ms += timestep_ms
        forwards = self._forwards_ms(load)
        waiting_ms = timestep_ms - sum(forwards)
        return Beat(timestep_ms / 1000, waiting_ms / 1000, tuple(forward / 1000 for forward in forwards))

    def _forwards_ms(self, load: TimestepLoad) -> list[float]:
        draft = self._emulation.draft
        return [draft.compute_ms(rows) for rows in load.drafted] if draft else []

    def _compute_ms(self, load: TimestepLoad) -> float:
        slowest = sum(self._forwards_ms(load))
        for group in self._topology.groups:
            inside = [self._send_ms(rank, load) for rank in group[:-1]]
            work = [self._emulation.stages[rank - 1].compute_ms(load.computed[rank]) for rank in group if rank in load.computed]
            slowest = max(slowest, sum(work) + sum(inside))
        return slowest

    def _transfer_ms(self, load: TimestepLoad) -> float:
        leaving = {rank: self._send_ms(rank, load) for rank in load.sent if self._topology.feeds_next_group(rank)}
        return max((leaving.get(rank, 0.0) + leaving.get(rank - 1, 0.0) for rank in self._topology.ranks), default=0.0)

    def _send_ms(self, rank: int, load: TimestepLoad) -> float:
        timing = self._emulation.timing(rank)
        return timing.send_ms(load.sent[rank]) if timing and rank in load.sent else 0.0


class ForwardTimer(Protocol):
    """What happens around one forward of the draft model with so many rows."""

    def __call__(self, rows: int, /) -> AbstractContextManager[None]: ...


class TimedDrafter:
    """A drafter with a timer around each of its forwards while it decodes."""

    def __init__(self, drafter: Drafter, timer: ForwardTimer) -> None:
        self._drafter = drafter
        self._timer = timer

    def begin(self) -> None:
        self._drafter.begin()

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        self._drafter.prefill(token_ids, prompt_length)

    def expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        with self._timer(len(rows)):
            return self._drafter.expand(tree, rows, children)

    def advance(self, advance: Advance) -> None:
        self._drafter.advance(advance)

    def for_threads(self, sequence: Sequence) -> TimedForestDrafter:
        """The same for the threads of an answer. Raises UserError if the drafter drafts one tree alone."""
        if not isinstance(self._drafter, DraftModel):
            raise UserError("this draft does not draft for several threads: use --method pp")
        return TimedForestDrafter(self._drafter.for_threads(sequence), self._timer)


class TimedForestDrafter:
    """As ``TimedDrafter``, for the threads of an answer."""

    def __init__(self, drafter: ForestDrafter, timer: ForwardTimer) -> None:
        self._drafter = drafter
        self._timer = timer

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        self._drafter.prefill(token_ids, prompt_length)

    def expand(self, asks: Rows[tuple[int, PredictionTree, Tensor]], children: int) -> list[Candidates]:
        with self._timer(sum(len(rows) for _, _, rows in asks)):
            return self._drafter.expand(asks, children)

    def advance(self, number: int, advance: Advance) -> None:
        self._drafter.advance(number, advance)

    def turned(self) -> None:
        self._drafter.turned()
