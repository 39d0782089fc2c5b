"""Which device of which host each rank takes, and how many layers each stage: even, explicit, or balanced by speed and memory.

Does not know whether the models fit there.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipedec.config import NONE, ClusterConfig, DeviceConfig, ServerConfig
from pipedec.config.cluster import PartitionConfig
from pipedec.core import UserError
from pipedec.hardware import DEVICES


@dataclass(frozen=True)
class Placement:
    """One device: ``index`` counts the GPUs of a host in the order of the configuration, and apart from them its processors."""

    host: str
    device: str
    index: int


def rank_places(config: ClusterConfig, partition_name: str | None = None) -> tuple[Placement, ...]:
    """The devices of ranks 0..n, of which rank 0 may share a stage's. It computes on a processor if there is no draft model.

    UserError if there is no such partition, or it needs more devices than the hosts have.
    """
    name, partition = config.find_partition(partition_name)
    draft, stages = place_stages(config.for_partition(name), name, partition)
    host = partition.draft_device.host if partition.draft_device else stages[0].host
    return (draft or Placement(host, "cpu", 0), *stages)


def spare_places(config: ClusterConfig, partition_name: str | None = None, count: int | None = None) -> tuple[Placement, ...]:
    """The devices that stand by for a partition: those that the file names, else ``count`` of those that the partition leaves.

    ``count`` devices, those of hosts without a rank first; None for all that the file names. UserError if there are fewer.
    """
    taken = rank_places(config, partition_name)
    hosts = {place.host for place in taken}
    free = [place for server in config.servers for place in _devices_of(server) if place not in taken]
    if config.spares:
        free = _take_spares(free, config)
    elif count is None:
        return ()
    found = sorted(free, key=lambda place: place.host in hosts)[:count]
    if count is not None and len(found) < count:
        raise UserError(f"--spares {count}: the partition leaves {len(found)} devices: add servers, or devices to a server")
    return tuple(found)


def place_stages(config: ClusterConfig, name: str, partition: PartitionConfig) -> tuple[Placement | None, list[Placement]]:
    """The devices of the draft (None without a draft model) and of stages 1..n. UserError when there are too few.

    The draft takes the last device of its kind on its host, so that stages keep the front ones; if it shares one, that of the
    last stage there.
    """
    free = [place for server in config.servers for place in _devices_of(server)]
    _take_spares(free, config)
    path, for_draft = f"partitions.{name}.draft_device", partition.draft_device if config.draft != NONE else None
    if config.draft != NONE and for_draft is None:
        raise UserError(f"{path}: missing: the draft model needs a device (or set draft: none)")
    draft = _take(free, for_draft, path, last=True) if for_draft and not for_draft.shared else None
    if partition.devices:
        wanted = [entry for entry in partition.devices for _ in range(entry.count)]
        places = [_take(free, entry, f"partitions.{name}.devices") for entry in wanted]
    else:
        hosts = partition.servers or tuple(server.host for server in config.servers)
        places = [place for host in hosts for place in free if place.host == host]
    stages = partition.settings.cut.stages
    if len(places) < stages:
        raise UserError(f"partitions.{name}.stages: {stages} stages need as many devices, but {len(places)} are free")
    if for_draft and for_draft.shared:
        kind, host = for_draft.device, for_draft.host
        found = [place for place in places[:stages] if (place.host, place.device) == (host, kind)]
        if not found:
            raise UserError(f"{path}: no stage takes a {kind} on {host}: name a stage's device, or leave shared out")
        draft = found[-1]
    return draft, places[:stages]


def _devices_of(server: ServerConfig) -> list[Placement]:
    kinds = [kind for kind, count in server.devices.items() for _ in range(count)]
    same = [[DEVICES[other].is_gpu for other in kinds[:index]].count(DEVICES[kind].is_gpu) for index, kind in enumerate(kinds)]
    return [Placement(server.host, kind, index) for kind, index in zip(kinds, same, strict=True)]


def _take_spares(free: list[Placement], config: ClusterConfig) -> list[Placement]:
    """The spares that the file names, each the last device of its kind, like the draft's. UserError when there are too few."""
    return [_take(free, entry, "spares", last=True) for entry in config.spares for _ in range(entry.count)]


def _take(free: list[Placement], wanted: DeviceConfig, path: str, last: bool = False) -> Placement:
    found = [place for place in free if (place.host, place.device) == (wanted.host, wanted.device)]
    if not found:
        raise UserError(f"{path}: no free {wanted.device} is left on {wanted.host}")
    chosen = found[-1 if last else 0]
    free.remove(chosen)
    return chosen


def even_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as equal as possible; the first stages take the remainder. UserError for too many stages."""
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    if stages < 1:
        raise UserError(f"stages must be at least 1, not {stages}")
    size, longer = divmod(num_layers, stages)
    starts = [stage * size + min(stage, longer) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def explicit_layers(counts: Sequence[int], num_layers: int) -> list[range]:
    """The layers of each stage from their numbers. UserError unless they are positive and add up to ``num_layers``."""
    if any(count < 1 for count in counts):
        raise UserError("every stage needs at least 1 layer")
    if sum(counts) != num_layers:
        raise UserError(f"layers sum to {sum(counts)}, the target has {num_layers}")
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def balance(num_layers: int, layer_ms: Sequence[float], extra_ms: Sequence[float], room: Sequence[int]) -> list[int]:
    """The number of layers of each stage, at least 1, that makes the slowest stage as fast as possible.

    Stage i takes ``extra_ms[i] + layers · layer_ms[i]`` and holds at most ``room[i]`` layers. Each further layer goes to the
    stage that is fastest with it (of equals the first). This is exact: it takes the cheapest of all (stage, number of layers)
    steps, so no other split has a lower maximum. UserError if the layers do not fit.
    """
    stages = len(layer_ms)
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    for stage, layers in enumerate(room, start=1):
        if layers < 1:
            raise UserError(f"stage {stage} has no room for a single layer")
    if sum(room) < num_layers:
        raise UserError(f"the {stages} stages have room for {sum(room)} layers, the target has {num_layers}")
    counts = [1] * stages
    queue = [(extra_ms[stage] + 2 * layer_ms[stage], stage) for stage in range(stages) if room[stage] > 1]
    heapq.heapify(queue)
    for _ in range(num_layers - stages):
        _, stage = heapq.heappop(queue)
        counts[stage] += 1
        if counts[stage] < room[stage]:
            heapq.heappush(queue, (extra_ms[stage] + (counts[stage] + 1) * layer_ms[stage], stage))
    return counts
