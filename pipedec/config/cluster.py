"""``cluster.yaml``: models, devices, network and partitions of a cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen, Predicate

from pipedec.config.files import parse_yaml, read_text
from pipedec.config.redis import RedisConfig, redis_config
from pipedec.core import BadValue, UserError
from pipedec.hardware import DEVICES, LINKS, MODEL_SHAPES
from pipedec.methods import LayerTreeOptions
from pipedec.validation import unknown_name, validated


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", text) is not None


Name = Annotated[str, Predicate(_is_name)]
Text = Annotated[str, MinLen(1)]


@dataclass(frozen=True)
class NetworkConfig:
    """The links between devices. Only plans and emulation use them; a running cluster has the network it has.

    Attributes:
        latency_us: one way, between servers.
        bandwidth_gbps: Gbit/s between servers.
        within_server: the link between the devices of one server.
    """

    latency_us: Annotated[float, Ge(0), Le(1e9)] = 50.0
    bandwidth_gbps: Annotated[float, Gt(0), Le(1e9)] = 10.0
    within_server: Text = "pcie4"

    def __post_init__(self) -> None:
        if self.within_server not in LINKS:
            raise BadValue(f"within_server: {unknown_name('link', self.within_server, LINKS)}")


@dataclass(frozen=True)
class ServerConfig:
    """A host and how many devices of each kind it has, in the order in which stages take them. For plans and emulation."""

    host: Name
    devices: Mapping[str, Annotated[int, Ge(1), Le(64)]]

    def __post_init__(self) -> None:
        for name in self.devices:
            if name not in DEVICES:
                raise BadValue(f"devices: {unknown_name('device', name, DEVICES)}")


@dataclass(frozen=True)
class DeviceConfig:
    """One device of a host, or ``count`` of them. For plans and emulation."""

    host: Name
    device: str
    count: Annotated[int, Ge(1), Le(64)] = 1

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise BadValue(f"device: {unknown_name('device', self.device, DEVICES)}")


@dataclass(frozen=True)
class PartitionConfig:
    """How the target is cut: stages, the groups that share a timestep slot, and the devices they take in order.

    A running cluster has these stages, groups and layers. ``servers``, ``devices`` and ``draft_device`` are for plans and
    emulation, and so for ``layers: auto``: which rank runs where is decided by whoever starts the ranks.

    Attributes:
        stages: number of stages n.
        groups: number of groups d (paper §3.1); one per stage if not given.
        servers: hosts whose devices are taken in this order; all servers when neither this nor ``devices`` is given.
        devices: the devices one by one, instead of ``servers``.
        layers: ``auto``, or the number of transformer layers of each stage.
        draft_device: the device of the draft model, which no stage takes.
    """

    stages: Annotated[int, Ge(1), Le(1024)]
    groups: Annotated[int, Ge(1), Le(1024)] | None = None
    servers: tuple[Text, ...] = ()
    devices: tuple[DeviceConfig, ...] = ()
    layers: Literal["auto"] | tuple[Annotated[int, Ge(1), Le(100_000)], ...] = "auto"
    draft_device: DeviceConfig | None = None

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups > self.stages:
            raise BadValue(f"groups: {self.groups} groups need at least as many stages, but there are {self.stages}")
        if self.layers != "auto" and len(self.layers) != self.stages:
            raise BadValue(f"layers: {len(self.layers)} entries for {self.stages} stages: give one number per stage, or auto")
        if self.servers and self.devices:
            raise BadValue("servers: give servers or devices, not both")
        if len(set(self.servers)) < len(self.servers):
            raise BadValue("servers: a host is listed twice: list each host once")
        num_devices = sum(entry.count for entry in self.devices)
        if self.devices and num_devices != self.stages:
            raise BadValue(f"devices: {num_devices} devices for {self.stages} stages: give one device per stage")

    @property
    def num_groups(self) -> int:
        return self.groups or self.stages


@dataclass(frozen=True)
class ClusterConfig:
    """The whole of ``cluster.yaml``.

    Attributes:
        target: checkpoint directory, or a known shape (enough for a plan, not for running).
        draft: the same for the draft model, or ``none``.
        bita: the directory of a BiTA that was trained for the target, or ``none``. A plan does not count it.
        dtype: type of weights, activations and caches.
        context_tokens: maximum tokens of a prompt and its answer together. A plan reserves KV caches of this size; a running
            cluster refuses requests that exceed it.
        tree: the tree of ``pipedec`` and ``stpp``: what a plan counts with, and a running cluster's default for requests that
            set no width or children. Other methods find their own limits.
        redis: the Redis server of a running cluster.
        network, servers: for plans and emulation.
        partition: the partition to use if none is named; not needed if there is only one.
    """

    target: Text
    servers: tuple[ServerConfig, ...]
    partitions: Mapping[Name, PartitionConfig]
    draft: Text = "none"
    bita: Text = "none"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    context_tokens: Annotated[int, Ge(1), Le(10_000_000)] = 4096
    tree: LayerTreeOptions = LayerTreeOptions()
    redis: RedisConfig = RedisConfig()
    network: NetworkConfig = NetworkConfig()
    partition: str | None = None

    def __post_init__(self) -> None:
        hosts = [server.host for server in self.servers]
        for key, given in (("servers", hosts), ("partitions", list(self.partitions))):
            if not given:
                raise BadValue(f"{key}: must not be empty")
        for host in hosts:
            if hosts.count(host) > 1:
                raise BadValue(f"servers: host {host} is listed twice: list each host once")
        if self.partition is not None and self.partition not in self.partitions:
            raise BadValue(f"partition: {unknown_name('partition', self.partition, self.partitions)}")
        for name, partition in self.partitions.items():
            for key, named in _hosts_of(partition):
                if named not in hosts:
                    raise BadValue(f"partitions.{name}.{key}: {unknown_name('host', named, hosts)}")

    def find_partition(self, name: str | None = None) -> tuple[str, PartitionConfig]:
        """The partition ``name``, else the file's default, else the only one. UserError if there is no such partition."""
        chosen = name or self.partition or (next(iter(self.partitions)) if len(self.partitions) == 1 else None)
        if chosen is None:
            raise UserError(f"name a partition: {', '.join(self.partitions)} (or set partition: in the file)")
        if chosen not in self.partitions:
            raise UserError(unknown_name("partition", chosen, self.partitions))
        return chosen, self.partitions[chosen]


def _hosts_of(partition: PartitionConfig) -> list[tuple[str, str]]:
    named = [(f"servers[{index}]", host) for index, host in enumerate(partition.servers)]
    named += [(f"devices[{index}].host", entry.host) for index, entry in enumerate(partition.devices)]
    if partition.draft_device:
        named.append(("draft_device.host", partition.draft_device.host))
    return named


def paper_cluster() -> ClusterConfig:
    """The cluster of the PipeDec paper, shipped with the program: the partitions ``paper-7``, ``paper-14``, ``paper-21``, …"""
    package = Path(__file__).resolve().parent.parent
    # In a wheel the file lies inside the package, in a checkout beside it.
    return load_cluster(next(path for path in (package / "cluster.yaml", package.parent / "cluster.yaml") if path.is_file()))


def load_cluster(path: str | Path) -> ClusterConfig:
    """Read ``cluster.yaml``; relative checkpoint directories count from the file's own folder.

    PIPEDEC_REDIS_URL and PIPEDEC_REDIS_PASSWORD take precedence over the file. Every mistake is a UserError of one line
    that begins with the path of the file and of the key.
    """
    path = Path(path)
    config = validated(ClusterConfig, parse_yaml(read_text(path), str(path)), str(path))
    target, draft, bita = (_relative_to(path.parent, model) for model in (config.target, config.draft, config.bita))
    return replace(config, target=target, draft=draft, bita=bita, redis=redis_config(base=config.redis))


def _relative_to(folder: Path, model: str) -> str:
    return model if model == "none" or model in MODEL_SHAPES else str(folder / os.path.expanduser(model))
