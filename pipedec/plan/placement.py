"""Which device of which host each rank takes."""

from __future__ import annotations

from dataclasses import dataclass

from pipedec.config import ClusterConfig, DeviceConfig, PartitionConfig
from pipedec.core import UserError


@dataclass(frozen=True)
class Placement:
    """One device: ``index`` counts the devices of the host in the order of the configuration."""

    host: str
    device: str
    index: int


def place_stages(config: ClusterConfig, name: str, partition: PartitionConfig) -> tuple[Placement | None, list[Placement]]:
    """The devices of the draft (None without a draft model) and of stages 1..n. UserError when there are too few.

    The draft takes the last device of its kind on its host, so that stages keep the front ones.
    """
    free = [
        Placement(server.host, device, index)
        for server in config.servers
        for index, device in enumerate(device for device, count in server.devices.items() for _ in range(count))
    ]
    draft = None
    if config.draft != "none":
        if partition.draft_device is None:
            raise UserError(f"partitions.{name}.draft_device: missing: the draft model needs a device (or set draft: none)")
        draft = _take(free, partition.draft_device, f"partitions.{name}.draft_device", last=True)
    if partition.devices:
        wanted = [entry for entry in partition.devices for _ in range(entry.count)]
        places = [_take(free, entry, f"partitions.{name}.devices") for entry in wanted]
    else:
        hosts = partition.servers or tuple(server.host for server in config.servers)
        places = [place for host in hosts for place in free if place.host == host]
    if len(places) < partition.stages:
        raise UserError(f"partitions.{name}.stages: {partition.stages} stages need as many devices, but {len(places)} are free")
    return draft, places[: partition.stages]


def _take(free: list[Placement], wanted: DeviceConfig, path: str, last: bool = False) -> Placement:
    found = [place for place in free if (place.host, place.device) == (wanted.host, wanted.device)]
    if not found:
        raise UserError(f"{path}: no free {wanted.device} is left on {wanted.host}")
    chosen = found[-1 if last else 0]
    free.remove(chosen)
    return chosen
