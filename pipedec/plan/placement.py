"""Which device of which host each rank takes. Does not know whether the models fit there."""

from __future__ import annotations

from dataclasses import dataclass

from pipedec.config import NONE, ClusterConfig, DeviceConfig, PartitionConfig, ServerConfig
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

    Raises:
        UserError: there is no such partition, or it needs more devices than the hosts have.
    """
    name, partition = config.find_partition(partition_name)
    draft, stages = place_stages(config.for_partition(name), name, partition)
    host = partition.draft_device.host if partition.draft_device else stages[0].host
    return (draft or Placement(host, "cpu", 0), *stages)


def spare_places(config: ClusterConfig, partition_name: str | None = None, count: int | None = None) -> tuple[Placement, ...]:
    """The devices that stand by for a partition: those that the file names, else ``count`` of those that the partition leaves.

    Args:
        count: how many, those of hosts without a rank first; None for all that the file names.

    Raises:
        UserError: there are fewer.
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
        draft = _shared(places[:stages], for_draft, path)
    return draft, places[:stages]


def _shared(stages: list[Placement], wanted: DeviceConfig, path: str) -> Placement:
    found = [place for place in stages if (place.host, place.device) == (wanted.host, wanted.device)]
    if not found:
        raise UserError(f"{path}: no stage takes a {wanted.device} on {wanted.host}: name a stage's device, or leave shared out")
    return found[-1]


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
