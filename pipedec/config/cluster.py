"""``cluster.yaml``: models, devices, network and partitions of a cluster."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from pipedec.config.files import parse_yaml, read_text
from pipedec.config.redis import RedisConfig, redis_config
from pipedec.core import MAX_NUM_SEQS, MAX_WAITING, BadValue, UserError
from pipedec.hardware import DEVICES, LINKS, MODEL_SHAPES
from pipedec.methods import LayerTreeOptions
from pipedec.validation import byte_size, parse_json, shortened, unknown_name, validated

Name = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z", description="a name of letters, digits, '.', '_' and '-'"),
]
Text = Annotated[str, Meta(min_length=1)]
Environment = Mapping[str, str]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantize = Literal["int8", "int4"]
MaxModelLen = Annotated[int, Meta(ge=1, le=10_000_000)]


@dataclass(frozen=True)
class NetworkConfig:
    """The links between devices. Only plans and emulation use them; a running cluster has the network it has.

    Attributes:
        latency_us: one way, between servers.
        bandwidth_gbps: Gbit/s between servers.
        within_server: the link between the devices of one server.
        duplex: ``half`` if a rank takes part in one transfer at a time (Algorithm 2's rule), ``full`` if it sends and receives
            at the same time.
    """

    latency_us: Annotated[float, Meta(ge=0, le=1e9)] = 50.0
    bandwidth_gbps: Annotated[float, Meta(gt=0, le=1e9)] = 10.0
    within_server: Text = "pcie4"
    duplex: Literal["half", "full"] = "half"

    def __post_init__(self) -> None:
        if self.within_server not in LINKS:
            raise BadValue(f"within_server: {unknown_name('link', self.within_server, LINKS)}")


@dataclass(frozen=True)
class ServerConfig:
    """A host and how many devices of each kind it has, in the order in which stages take them.

    Attributes:
        host: its name in this file.
        devices: number of devices by kind. GPUs in the order of their PCI bus; ``cpu`` is a rank that computes on the processor.
        ssh: where ``pipedec launch`` connects to, as one would tell ssh; ``host`` if not given.
        hostname: what the machine calls itself, where that is not ``host``.
        interface: network interface of its transfers; the one that routes to the other hosts if not given.
        python: the interpreter that has pipedec there; that of ``launch`` if not given.
        environment: variables for its ranks, besides those of ``launch``.
    """

    host: Name
    devices: Mapping[str, Annotated[int, Meta(ge=1, le=64)]]
    ssh: Text | None = None
    hostname: Text | None = None
    interface: Name | None = None
    python: Text | None = None
    environment: Environment = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in self.devices:
            if name not in DEVICES:
                raise BadValue(f"devices: {unknown_name('device', name, DEVICES)}")
        if self.ssh is not None and (self.ssh.startswith("-") or len(self.ssh.split()) != 1):
            raise BadValue("ssh: must be one destination, like host or user@host: options belong into ~/.ssh/config")
        _check_environment(self.environment)

    @property
    def ssh_destination(self) -> str:
        return self.ssh or self.host


@dataclass(frozen=True)
class LaunchConfig:
    """What ``pipedec launch`` starts on every host.

    Attributes:
        python: the interpreter that has pipedec; the one that runs ``pipedec launch`` if not given.
        directory: working directory of the ranks; the user's home if not given.
        environment: variables for all ranks.
    """

    python: Text | None = None
    directory: Text | None = None
    environment: Environment = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_environment(self.environment)


def _check_environment(variables: Environment) -> None:
    for name in variables:
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise BadValue(f"environment: {shortened(name)!r} is no name of a variable: use letters, digits and '_'")


@dataclass(frozen=True)
class DeviceConfig:
    """One device of a host, or ``count`` of them."""

    host: Name
    device: str
    count: Annotated[int, Meta(ge=1, le=64)] = 1

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise BadValue(f"device: {unknown_name('device', self.device, DEVICES)}")


@dataclass(frozen=True)
class PartitionConfig:
    """How the target is cut: stages, the groups that share a timestep slot, and the devices they take in order.

    Attributes:
        stages: number of stages n.
        groups: number of groups d (paper §3.1); one per stage if not given.
        servers: hosts whose devices are taken in this order; all servers when neither this nor ``devices`` is given.
        devices: the devices one by one, instead of ``servers``.
        layers: ``auto``, or the number of transformer layers of each stage.
        draft_device: the device of the draft model, which no stage takes. Without a draft model rank 0 computes nothing, and runs
            on this host or on that of stage 1.
        target, draft, bita, dtype, quantize, draft_dtype, draft_quantize, max_model_len: of this partition alone; the file's if
            not given.
    """

    stages: Annotated[int, Meta(ge=1, le=1024)]
    groups: Annotated[int, Meta(ge=1, le=1024)] | None = None
    servers: tuple[Text, ...] = ()
    devices: tuple[DeviceConfig, ...] = ()
    layers: Literal["auto"] | tuple[Annotated[int, Meta(ge=1, le=100_000)], ...] = "auto"
    draft_device: DeviceConfig | None = None
    target: Text | None = None
    draft: Text | None = None
    bita: Text | None = None
    dtype: Dtype | None = None
    quantize: Quantize | None = None
    draft_dtype: Dtype | None = None
    draft_quantize: Quantize | None = None
    max_model_len: MaxModelLen | None = None

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
        dtype: type of weights, activations and caches. ``auto``: the checkpoint's 16 bits if all stages have GPUs, else float32.
        quantize: ``int8`` or ``int4`` weights of the target, rounded as they are read; those of ``dtype`` if not given.
        draft_dtype, draft_quantize: the same for the draft, whose precision changes the speed of answers alone. ``auto``: 16 bits
            on a GPU or a processor with bfloat16 instructions, else float32.
        max_model_len: maximum tokens of a prompt and its answer together. A plan reserves KV caches of this size; a running
            cluster refuses requests that exceed it.
        max_num_seqs: most requests in the pipeline at the same time; further ones wait.
        max_waiting: most requests that wait; further ones are refused.
        kv_cache_memory: bytes for keys and values on every rank, like ``4GiB``; what weights and activations leave if not given
            (of a processor's memory, which is nominal, 2 GiB at most).
        prefix_cache: let requests share the keys and values of equal beginnings.
        tree: the tree of ``pipedec`` and ``stpp``: what a plan counts with, and a running cluster's default for requests that
            set no width or children. Other methods find their own limits.
        redis: the Redis server of a running cluster: an address, or the host on which ``pipedec launch`` starts one.
        network: for plans and emulation.
        servers: the hosts.
        spares: devices that stand by, without weights, for ranks whose hosts are lost; no stage takes them.
        launch: how ranks are started on them.
        partition: the partition to use if none is named; not needed if there is only one.
    """

    target: Text
    servers: tuple[ServerConfig, ...]
    partitions: Mapping[Name, PartitionConfig]
    draft: Text = "none"
    bita: Text = "none"
    dtype: Dtype = "auto"
    quantize: Quantize | None = None
    draft_dtype: Dtype = "auto"
    draft_quantize: Quantize | None = None
    max_model_len: MaxModelLen = 4096
    max_num_seqs: Annotated[int, Meta(ge=1, le=65_536)] = MAX_NUM_SEQS
    max_waiting: Annotated[int, Meta(ge=0, le=10_000_000)] = MAX_WAITING
    kv_cache_memory: Text | None = None
    prefix_cache: bool = True
    tree: LayerTreeOptions = LayerTreeOptions()
    redis: RedisConfig = RedisConfig()
    network: NetworkConfig = NetworkConfig()
    spares: tuple[DeviceConfig, ...] = ()
    launch: LaunchConfig = LaunchConfig()
    partition: str | None = None

    def __post_init__(self) -> None:
        hosts = [server.host for server in self.servers]
        for key, given in (("servers", hosts), ("partitions", list(self.partitions))):
            if not given:
                raise BadValue(f"{key}: must not be empty")
        for host in hosts:
            if hosts.count(host) > 1:
                raise BadValue(f"servers: host {host} is listed twice: list each host once")
        if self.kv_cache_memory is not None:
            byte_size(self.kv_cache_memory, "kv_cache_memory:")
        if self.partition is not None and self.partition not in self.partitions:
            raise BadValue(f"partition: {unknown_name('partition', self.partition, self.partitions)}")
        if self.redis.host is not None and self.redis.host not in hosts:
            raise BadValue(f"redis.host: {unknown_name('host', self.redis.host, hosts)}")
        named_in = [(f"spares[{index}].host", entry.host) for index, entry in enumerate(self.spares)]
        for name, partition in self.partitions.items():
            named_in += [(f"partitions.{name}.{key}", named) for key, named in _hosts_of(partition)]
        for key, named in named_in:
            if named not in hosts:
                raise BadValue(f"{key}: {unknown_name('host', named, hosts)}")

    @property
    def kv_cache_bytes(self) -> int | None:
        """``kv_cache_memory`` in bytes."""
        return None if self.kv_cache_memory is None else byte_size(self.kv_cache_memory, "kv_cache_memory:")

    def find_partition(self, name: str | None = None) -> tuple[str, PartitionConfig]:
        """The partition ``name``, else the file's default, else the only one. UserError if there is no such partition."""
        chosen = name or self.partition or (next(iter(self.partitions)) if len(self.partitions) == 1 else None)
        if chosen is None:
            raise UserError(f"name a partition: {', '.join(self.partitions)} (or set partition: in the file)")
        if chosen not in self.partitions:
            raise UserError(unknown_name("partition", chosen, self.partitions))
        return chosen, self.partitions[chosen]

    def for_partition(self, name: str | None = None) -> ClusterConfig:
        """With the models, dtype and context of one partition, which becomes the default. UserError as ``find_partition``."""
        name, partition = self.find_partition(name)
        own: dict[str, Any] = {key: value for key in _OF_A_PARTITION if (value := getattr(partition, key)) is not None}
        return replace(self, partition=name, **own)

    def server(self, host: str) -> ServerConfig:
        """The entry of a host that the file lists."""
        return next(server for server in self.servers if server.host == host)


_OF_A_PARTITION = ("target", "draft", "bita", "dtype", "quantize", "draft_dtype", "draft_quantize", "max_model_len")


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
    partitions = {name: _with_paths(partition, path.parent) for name, partition in config.partitions.items()}
    return replace(_with_paths(config, path.parent), partitions=partitions, redis=redis_config(base=config.redis))


def cluster_from_json(text: str) -> ClusterConfig:
    """What another pipedec process has written with ``cluster_to_json``. UserError if that was another version."""
    return parse_json(ClusterConfig, text, "the configuration of the cluster")


def cluster_to_json(config: ClusterConfig) -> str:
    """As one line of JSON. It holds the Redis password if there is one: never print it."""
    return json.dumps(asdict(config))


_Models = TypeVar("_Models", ClusterConfig, PartitionConfig)


def _with_paths(config: _Models, folder: Path) -> _Models:
    """With checkpoint directories that count from ``folder``."""
    models = {key: getattr(config, key) for key in ("target", "draft", "bita")}
    paths: dict[str, Any] = {key: _relative_to(folder, model) for key, model in models.items() if model is not None}
    return replace(config, **paths)


def _relative_to(folder: Path, model: str) -> str:
    return model if model == "none" or model in MODEL_SHAPES else str(folder / os.path.expanduser(model))
