"""``cluster.yaml``: models, devices, network and partitions of a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta, json

from pipedec.config.redis import RedisConfig, redis_config
from pipedec.config.settings import AUTO, NONE, SETTINGS, Settings, Text
from pipedec.core.errors import BadValue, UserError
from pipedec.core.values import joined, unknown_name
from pipedec.families import is_known
from pipedec.gguf import is_named
from pipedec.hardware import DEVICES, LINKS, LinkSpec
from pipedec.validation import parse_json, parse_yaml, read_text, validated

Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z", description="a name of letters, digits, '.', '_' and '-'")
]
_Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", description="a variable's name of letters, digits and '_'")]
Environment = Mapping[_Variable, str]
_LINKS, _DEVICES = tuple(LINKS), tuple(DEVICES)
LinkName = Literal[_LINKS]  # type: ignore[valid-type]
DeviceName = Literal[_DEVICES]  # type: ignore[valid-type]
Microseconds = Annotated[float, Meta(ge=0, le=1e9)]
Gbps = Annotated[float, Meta(gt=0, le=1e9)]


@dataclass(frozen=True)
class PairConfig:
    """The link between two hosts, the same in both directions; without a value, that of the network."""

    between: tuple[Text, Text]
    latency_us: Microseconds | None = None
    bandwidth_gbps: Gbps | None = None

    def __post_init__(self) -> None:
        if len(set(self.between)) < 2:
            raise BadValue(f"between: {self.between[0]} twice: name two hosts")


@dataclass(frozen=True)
class NetworkConfig:
    """The links between devices. Plans and emulation use their speed; a running cluster uses ``duplex``, and the latencies of
    ``links`` for the order of its hosts.

    Attributes:
        latency_us: one way, between servers.
        bandwidth_gbps: Gbit/s between servers.
        links: pairs of servers with other values.
        duplex: ``full`` if a rank sends and receives at the same time, ``half`` if it takes part in one transfer at a time
            (Algorithm 2's rule).
    """

    latency_us: Microseconds = 50.0
    bandwidth_gbps: Gbps = 10.0
    links: tuple[PairConfig, ...] = ()
    within_server: LinkName = "pcie4"
    duplex: Literal["half", "full"] = "full"

    def __post_init__(self) -> None:
        for index, link in enumerate(self.links):
            if any(set(link.between) == set(earlier.between) for earlier in self.links[:index]):
                raise BadValue(f"links[{index}]: {' and '.join(link.between)} are listed twice: list each pair once")

    def link(self, source: str, target: str) -> LinkSpec:
        """The link from a device of host ``source`` to another one of host ``target``."""
        if source == target:
            return LINKS[self.within_server]
        own = next((link for link in self.links if {source, target} == set(link.between)), PairConfig((source, target)))
        latency_us = self.latency_us if own.latency_us is None else own.latency_us
        gbps = self.bandwidth_gbps if own.bandwidth_gbps is None else own.bandwidth_gbps
        return LinkSpec("between servers", latency_us, gbps / 8, "network: of the configuration")


@dataclass(frozen=True)
class ServerConfig:
    """A host and how many devices of each kind it has, in the order in which stages take them.

    Attributes:
        devices: number of devices by kind. GPUs in the order of their PCI bus; ``cpu`` is a rank that computes on the processor.
        ssh: where ``pipedec launch`` connects to, as an argument of ssh; ``host`` if not given.
        hostname: the machine's own name, where that is not ``host``.
        interface: network interface of its transfers; the one that routes to the other hosts if not given.
        python: the interpreter that has pipedec there; that of ``launch`` if not given.
        environment: variables for its ranks, besides those of ``launch``.
    """

    host: Name
    devices: Mapping[DeviceName, Annotated[int, Meta(ge=1, le=64)]]
    ssh: Text | None = None
    hostname: Text | None = None
    interface: Name | None = None
    python: Text | None = None
    environment: Environment = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.ssh is not None and (self.ssh.startswith("-") or len(self.ssh.split()) != 1):
            raise BadValue("ssh: must be one destination, like host or user@host: options belong into ~/.ssh/config")

    @property
    def ssh_destination(self) -> str:
        return self.ssh or self.host


@dataclass(frozen=True)
class LaunchConfig:
    """How ``pipedec launch`` starts nodes on every host: by default with its own interpreter, in the user's home."""

    python: Text | None = None
    directory: Text | None = None
    environment: Environment = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class DeviceConfig:
    """One device of a host, or ``count`` of them.

    Attributes:
        shared: of a ``draft_device`` alone: the device is one that a stage takes, the last stage's of this kind on the host.
    """

    host: Name
    device: DeviceName
    count: Annotated[int, Meta(ge=1, le=64)] = 1
    shared: bool = False


def _check_unshared(key: str, devices: Iterable[DeviceConfig]) -> None:
    for index, entry in enumerate(devices):
        if entry.shared:
            raise BadValue(f"{key}[{index}].shared: only a draft_device may be shared with a stage: leave it out")


@dataclass(frozen=True)
class PartitionConfig:
    """A pipeline on some of the devices.

    Attributes:
        settings: those of the file, with the partition's own in their place.
        servers: hosts whose devices the stages take in this order; all servers when neither this nor ``devices`` is given.
        draft_device: the device of the draft model, which no stage takes unless it is ``shared``; on the host ``auto``, where the
            latencies from rank 0 through all stages and back add up to the least. Without a draft model rank 0 computes nothing,
            and runs on this host or on that of stage 1.
    """

    settings: Settings
    servers: tuple[Text, ...] = ()
    devices: tuple[DeviceConfig, ...] = ()
    draft_device: DeviceConfig | None = None

    def __post_init__(self) -> None:
        if self.servers and self.devices:
            raise BadValue("servers: give servers or devices, not both")
        if len(set(self.servers)) < len(self.servers):
            raise BadValue("servers: a host is listed twice: list each host once")
        num_devices, stages = sum(entry.count for entry in self.devices), self.settings.cut.stages
        if self.devices and num_devices != stages:
            raise BadValue(f"devices: {num_devices} devices for {stages} stages: give one device per stage")
        _check_unshared("devices", self.devices)


@dataclass(frozen=True)
class ClusterConfig:
    """The whole of ``cluster.yaml``.

    Attributes:
        settings: of all partitions that do not have their own.
        spares: devices that stand by, without weights, for ranks whose hosts are lost; no stage takes them.
        partition: the partition to use if none is named; not needed if there is only one.
    """

    servers: Annotated[tuple[ServerConfig, ...], Meta(min_length=1)]
    partitions: Mapping[str, PartitionConfig]
    settings: Settings
    network: NetworkConfig = NetworkConfig()
    spares: tuple[DeviceConfig, ...] = ()
    launch: LaunchConfig = LaunchConfig()
    partition: str | None = None

    def __post_init__(self) -> None:
        hosts = [server.host for server in self.servers]
        for host in hosts:
            if hosts.count(host) > 1:
                raise BadValue(f"servers: host {host} is listed twice: list each host once")
        _check_unshared("spares", self.spares)
        if self.partition is not None and self.partition not in self.partitions:
            raise BadValue(f"partition: {unknown_name('partition', self.partition, self.partitions)}")
        if self.redis.host is not None and self.redis.host not in hosts:
            raise BadValue(f"redis.host: {unknown_name('host', self.redis.host, hosts)}")
        named_in = [(f"spares[{index}].host", entry.host) for index, entry in enumerate(self.spares)]
        for index, link in enumerate(self.network.links):
            named_in += [(f"network.links[{index}].between", host) for host in link.between]
        for name, partition in self.partitions.items():
            path = f"partitions.{name}"
            named_in += [(f"{path}.servers[{index}]", host) for index, host in enumerate(partition.servers)]
            named_in += [(f"{path}.devices[{index}].host", entry.host) for index, entry in enumerate(partition.devices)]
            if partition.draft_device and partition.draft_device.host != AUTO:
                named_in.append((f"{path}.draft_device.host", partition.draft_device.host))
        for key, named in named_in:
            if named not in hosts:
                raise BadValue(f"{key}: {unknown_name('host', named, hosts)}")

    @property
    def redis(self) -> RedisConfig:
        return self.settings.cluster.redis

    @property
    def target(self) -> str:
        """A checkpoint, or a known shape."""
        assert self.settings.models.target is not None
        return self.settings.models.target

    @property
    def draft(self) -> str:
        """As ``target``, or ``none``."""
        return self.settings.models.draft or NONE

    @property
    def bita(self) -> str:
        """A directory, or ``none``."""
        return self.settings.models.bita or NONE

    def find_partition(self, name: str | None = None) -> tuple[str, PartitionConfig]:
        """The partition ``name``, else the file's default, else the only one. UserError if there is no such partition."""
        chosen = name or self.partition or (next(iter(self.partitions)) if len(self.partitions) == 1 else None)
        if chosen is None:
            raise UserError(f"name a partition: {', '.join(self.partitions)} (or set partition: in the file)")
        if chosen not in self.partitions:
            raise UserError(unknown_name("partition", chosen, self.partitions))
        return chosen, self.partitions[chosen]

    def for_partition(self, name: str | None = None, given: Mapping[str, Any] | None = None) -> ClusterConfig:
        """With one partition alone, whose settings become the file's; those that are ``given`` by name take precedence.

        Raises UserError as ``find_partition`` and ``Settings.parse``.
        """
        name, partition = self.find_partition(name)
        settings = partition.settings.parse(given or {})
        return replace(self, settings=settings, partitions={name: replace(partition, settings=settings)}, partition=name)

    def server(self, host: str) -> ServerConfig:
        """The entry of a host that the file lists."""
        return next(server for server in self.servers if server.host == host)


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
    config = cluster_from(parse_yaml(read_text(path), str(path)), str(path))

    def completed(settings: Settings) -> Settings:
        models = {key: getattr(settings.models, key) for key in ("target", "draft", "bita")}
        paths = {key: _relative_to(path.parent, model) for key, model in models.items() if model is not None}
        return settings.replaced(**paths, redis=redis_config(base=settings.cluster.redis))

    partitions = {name: replace(one, settings=completed(one.settings)) for name, one in config.partitions.items()}
    return replace(config, partitions=partitions, settings=completed(config.settings))


def cluster_from(document: object, source: str = "") -> ClusterConfig:
    """The configuration that plain values describe, keys as in cluster.yaml.

    A mistake is a UserError of one line that begins with ``source`` and the path of the key.
    """
    with _located(source):
        file: Any = validated(_ClusterDocument, document)
        settings = _overlaid(_DEFAULTS, file)
        if settings.models.target is None:
            raise UserError("target: missing")
        partitions = {}
        for name, keys in file.partitions.items():
            if keys.stages is None and file.stages is None:
                raise UserError(f"partitions.{name}.stages: missing")
            with _located(f"partitions.{name}", "."):
                own = _overlaid(settings, keys)
                partitions[name] = PartitionConfig(own, **{key: getattr(keys, key) for key in _PARTITION_KEYS})
        config = ClusterConfig(partitions=partitions, settings=settings, **{key: getattr(file, key) for key in _FILE_KEYS})
    return config


@contextmanager
def _located(source: str, separator: str = ": ") -> Iterator[None]:
    """Errors inside begin with ``source``."""
    try:
        yield
    except UserError as error:
        raise UserError(joined(source, str(error), separator)) from None


def _overlaid(settings: Settings, keys: Any) -> Settings:
    """Settings with those in place that a mapping of the file gives."""
    return settings.replaced(**{name: getattr(keys, name) for name in SETTINGS if getattr(keys, name) is not None})


def cluster_from_json(text: str) -> ClusterConfig:
    """Read the output of ``cluster_to_json`` from another pipedec process. UserError if that was another version."""
    source = "the configuration of the cluster"
    return cluster_from(parse_json(dict, text, source), source)


def cluster_to_json(config: ClusterConfig) -> str:
    """As one line of JSON, keys as in cluster.yaml. It holds the Redis password if there is one: never print it."""
    partitions = {
        name: {**dict(partition.settings.items()), **{key: getattr(partition, key) for key in _PARTITION_KEYS}}
        for name, partition in config.partitions.items()
    }
    own = {key: getattr(config, key) for key in _FILE_KEYS}
    return json.encode({**dict(config.settings.items()), **own, "partitions": partitions}).decode()


# What cluster.yaml sets differently: models and stages are named there, and a plan reserves KV caches of max_model_len tokens.
PLANNED_MODEL_LEN = 4096
_DEFAULTS = Settings().replaced(draft=NONE, bita=NONE, stages=1, max_model_len=PLANNED_MODEL_LEN)
_FILE_KEYS = tuple(key.name for key in fields(ClusterConfig) if key.name not in ("settings", "partitions"))
_PARTITION_KEYS = tuple(key.name for key in fields(PartitionConfig) if key.name != "settings")


def _document(name: str, kind: type, keys: Iterable[str], more: Mapping[str, Any]) -> type:
    """A dataclass with some fields of ``kind``, those of ``more``, and every setting, all of which may be left out."""
    hints, defaults = get_type_hints(kind, include_extras=True), {key.name: key.default for key in fields(kind)}
    own = [(key, hints[key], field(default=defaults[key])) for key in keys]
    settings = [(key, hint | None, field(default=None)) for key, hint in SETTINGS.items()]
    return make_dataclass(name, [*own, *more.items(), *settings], kw_only=True, frozen=True)


_PartitionDocument: Any = _document("PartitionDocument", PartitionConfig, _PARTITION_KEYS, {})
_ClusterDocument = _document(
    "ClusterDocument", ClusterConfig, _FILE_KEYS, {"partitions": Annotated[Mapping[Name, _PartitionDocument], Meta(min_length=1)]}
)


def _relative_to(folder: Path, model: str) -> str:
    """The path of a checkpoint that ``model`` names relative to ``folder``; other values as they are."""
    path = str(folder / os.path.expanduser(model))
    is_name = model == NONE or is_known(model) or (is_named(model) and not os.path.exists(path))
    return model if is_name else path
