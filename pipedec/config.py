"""Everything the program is told by files and by the environment, as one tree of frozen dataclasses.

The only module that reads configuration files and environment variables. It checks names, types and ranges, and says in
one line which key is wrong and what it may be; it does not know what a partition costs or whether it fits.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import stat
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote, unquote, urlsplit

import yaml

from pipedec.core import TreeParams, UserError
from pipedec.hardware import DEVICES, LINKS, MODEL_SHAPES, ModelShape

MAX_FILE_BYTES = 1_000_000
MAX_YAML_DEPTH = 20
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
TYPE_NAMES = {
    dict: "a mapping", list: "a list", str: "a string", bool: "true or false", int: "an integer", float: "a number",
    type(None): "empty",
}  # fmt: skip
Config = TypeVar("Config")


@dataclass(frozen=True)
class RedisConfig:
    """Where Redis is. The password is kept apart from the URL and never shown.

    Attributes:
        url: ``redis://host:port/database``, ``rediss://…`` (TLS) or ``unix:///path``, without a password.
        password: the environment variable PIPEDEC_REDIS_PASSWORD goes first.
        tls: encrypt the connection; the same as writing ``rediss://``.
    """

    url: str = "redis://127.0.0.1:6379/0"
    password: str | None = field(default=None, repr=False)
    tls: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            host, password, _ = parts.hostname, parts.password, parts.port
        except ValueError:
            raise UserError("url: not a Redis address: write redis://host:6379/0") from None
        if parts.scheme not in ("redis", "rediss", "unix") or not (parts.path if parts.scheme == "unix" else host):
            raise UserError("url: must look like redis://host:6379/0, rediss://host:6379/0 or unix:///path")
        if "password=" in parts.query:
            raise UserError("url: must not carry the password in its query: use PIPEDEC_REDIS_PASSWORD")
        if self.tls and parts.scheme == "unix":
            raise UserError("tls: a Unix socket has no TLS: remove tls, or use a rediss:// address")
        user_and_password, at, address = parts.netloc.rpartition("@")
        user = user_and_password.partition(":")[0]
        scheme = "rediss" if self.tls else parts.scheme
        path = parts.path + ("?" + parts.query) * bool(parts.query)
        object.__setattr__(self, "url", f"{scheme}://{user}{at * bool(user)}{address}{path}")
        object.__setattr__(self, "password", unquote(password) if password else self.password or None)
        object.__setattr__(self, "tls", scheme == "rediss")

    @property
    def connection_url(self) -> str:
        """The URL with the password in it: for connecting, never for showing."""
        if self.password is None:
            return self.url
        scheme, _, rest = self.url.partition("://")
        user, _, address = rest.rpartition("@")
        return f"{scheme}://{user}:{quote(self.password, safe='')}@{address}"


@dataclass(frozen=True)
class NetworkConfig:
    """How devices are joined, for planning and emulation.

    Attributes:
        latency_us: one way, between servers.
        bandwidth_gbps: Gbit/s between servers.
        within_server: the link between the devices of one server.
    """

    latency_us: float = field(default=50.0, metadata={"min": 0})
    bandwidth_gbps: float = field(default=10.0, metadata={"above": 0})
    within_server: str = field(default="pcie4", metadata={"choices": tuple(LINKS)})


@dataclass(frozen=True)
class ServerConfig:
    """A host and how many devices of each kind it has, in the order in which stages take them."""

    host: str = field(metadata={"name": True})
    devices: Mapping[str, int] = field(metadata={"keys": tuple(DEVICES), "min": 1, "max": 64})


@dataclass(frozen=True)
class DeviceConfig:
    """One device of a host, or ``count`` of them."""

    host: str = field(metadata={"name": True})
    device: str = field(metadata={"choices": tuple(DEVICES)})
    count: int = field(default=1, metadata={"min": 1, "max": 64})


@dataclass(frozen=True)
class PartitionConfig:
    """How the target is cut: stages, the groups that share a timestep slot, and the devices they take in order.

    Attributes:
        stages: number of stages n.
        groups: number of groups d (paper §3.1); as many as stages when it is left out.
        servers: hosts whose devices are taken in this order; all servers when neither this nor ``devices`` is given.
        devices: the devices one by one, instead of ``servers``.
        layers: ``auto``, or the number of transformer layers of each stage.
        draft_device: the device of the draft model, which no stage takes.
    """

    stages: int = field(metadata={"min": 1, "max": 1024})
    groups: int | None = field(default=None, metadata={"min": 1, "max": 1024})
    servers: tuple[str, ...] = ()
    devices: tuple[DeviceConfig, ...] = ()
    layers: Literal["auto"] | tuple[int, ...] = field(default="auto", metadata={"min": 1, "max": 100_000})
    draft_device: DeviceConfig | None = None

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups > self.stages:
            raise UserError(f"groups: {self.groups} groups need at least as many stages, but there are {self.stages}")
        if self.layers != "auto" and len(self.layers) != self.stages:
            raise UserError(f"layers: {len(self.layers)} entries for {self.stages} stages: give one number per stage, or auto")
        if self.servers and self.devices:
            raise UserError("servers: give servers or devices, not both")
        if len(set(self.servers)) < len(self.servers):
            raise UserError("servers: a host is listed twice: list each host once")
        num_devices = sum(entry.count for entry in self.devices)
        if self.devices and num_devices != self.stages:
            raise UserError(f"devices: {num_devices} devices for {self.stages} stages: give one device per stage")

    @property
    def num_groups(self) -> int:
        return self.groups or self.stages


@dataclass(frozen=True)
class ClusterConfig:
    """The whole of ``cluster.yaml``.

    Attributes:
        target: checkpoint directory, or a known shape (enough for planning, not for running).
        draft: the same for the draft model, or ``none``.
        bita: the directory of a BiTA that was trained for the target, or ``none``.
        dtype: type of weights, activations and caches.
        context_tokens: prompt and answer tokens that the KV caches must hold.
        partition: the partition that is used when none is named; the only one when there is one.
    """

    target: str
    servers: tuple[ServerConfig, ...]
    partitions: Mapping[str, PartitionConfig] = field(metadata={"name": True})
    draft: str = "none"
    bita: str = "none"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    context_tokens: int = field(default=4096, metadata={"min": 1, "max": 10_000_000})
    tree: TreeParams = field(default=TreeParams(), metadata={"min": 1, "max": 4096})
    redis: RedisConfig = RedisConfig()
    network: NetworkConfig = NetworkConfig()
    partition: str | None = None

    def __post_init__(self) -> None:
        hosts = [server.host for server in self.servers]
        for key, given in (("servers", hosts), ("partitions", list(self.partitions))):
            if not given:
                raise UserError(f"{key}: must not be empty")
        for host in hosts:
            if hosts.count(host) > 1:
                raise UserError(f"servers: host {host} is listed twice: list each host once")
        if self.partition is not None and self.partition not in self.partitions:
            raise UserError(f"partition: {_unknown('partition', self.partition, self.partitions)}")
        for name, partition in self.partitions.items():
            for key, named in _hosts_of(partition):
                if named not in hosts:
                    raise UserError(f"partitions.{name}.{key}: {_unknown('host', named, hosts)}")

    def find_partition(self, name: str | None = None) -> tuple[str, PartitionConfig]:
        """The partition ``name``, else the file's default, else the only one. UserError if there is no such partition."""
        chosen = name or self.partition or (next(iter(self.partitions)) if len(self.partitions) == 1 else None)
        if chosen is None:
            raise UserError(f"name a partition: {', '.join(self.partitions)} (or set partition: in the file)")
        if chosen not in self.partitions:
            raise UserError(_unknown("partition", chosen, self.partitions))
        return chosen, self.partitions[chosen]


def _hosts_of(partition: PartitionConfig) -> list[tuple[str, str]]:
    named = [(f"servers[{index}]", host) for index, host in enumerate(partition.servers)]
    named += [(f"devices[{index}].host", entry.host) for index, entry in enumerate(partition.devices)]
    if partition.draft_device:
        named.append(("draft_device.host", partition.draft_device.host))
    return named


def paper_cluster() -> ClusterConfig:
    """The cluster of the PipeDec paper, shipped with the program: the partitions ``paper-7``, ``paper-14``, ``paper-21``, …"""
    package = Path(__file__).resolve().parent
    # In a wheel the file lies inside the package, in a checkout beside it.
    return load_cluster(next(path for path in (package / "cluster.yaml", package.parent / "cluster.yaml") if path.is_file()))


def load_cluster(path: str | Path) -> ClusterConfig:
    """Read ``cluster.yaml``; relative checkpoint directories count from the file's own folder.

    PIPEDEC_REDIS_URL and PIPEDEC_REDIS_PASSWORD take precedence over the file. Every mistake is a UserError of one line
    that begins with the path of the file and of the key.
    """
    path = Path(path)
    document = _parse_yaml(_read_text(path), str(path))
    config = _with_prefix(str(path), lambda: _read(ClusterConfig, document, ""))
    target, draft, bita = (_relative_to(path.parent, place) for place in (config.target, config.draft, config.bita))
    return replace(config, target=target, draft=draft, bita=bita, redis=redis_config(base=config.redis))


def load_json(kind: type[Config], path: Path) -> Config:
    """The dataclass ``kind`` from a JSON file whose keys are its fields.

    Raises:
        UserError: one line that names the file and what is wrong in it.
    """
    return parse_json(kind, _read_text(path), str(path))


def parse_json(kind: type[Config], text: str, source: str) -> Config:
    """The dataclass ``kind`` from JSON text whose keys are its fields.

    Raises:
        UserError: one line that begins with ``source`` and says what is wrong in it.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError):
        raise UserError(f"{source}: not valid JSON, or a key stands in it twice") from None
    return _with_prefix(source, lambda: _read(kind, document, ""))


def redis_config(url: str | None = None, base: RedisConfig | None = None) -> RedisConfig:
    """The Redis to use: ``url`` (a flag), else PIPEDEC_REDIS_URL, else ``base`` (a file), else the local default.

    A password in the chosen URL is used; then PIPEDEC_REDIS_PASSWORD, then the one of ``base``. UserError for a bad URL.
    """
    base = base or RedisConfig()
    place = url or os.environ.get("PIPEDEC_REDIS_URL")
    password = os.environ.get("PIPEDEC_REDIS_PASSWORD") or base.password
    if not place:
        return replace(base, password=password)
    try:
        return RedisConfig(place, password)
    except UserError as error:
        source = "--redis" if url else "PIPEDEC_REDIS_URL"
        raise UserError(f"{source}: {str(error).removeprefix('url: ')}") from None


def secret_from_environment(name: str) -> str:
    """What the environment variable ``name`` holds. Raises UserError if that is nothing."""
    secret = os.environ.get(name)
    if not secret:
        raise UserError(f"the environment variable {name} is not set, or empty: it should hold the key")
    return secret


def redis_url_from_environment(url: str | None = None) -> str | None:
    """What to connect to, password included: ``url`` (a flag), else PIPEDEC_REDIS_URL; None when neither is given."""
    if not url and not os.environ.get("PIPEDEC_REDIS_URL"):
        return None
    return redis_config(url).connection_url


def model_shape(name: str) -> ModelShape:
    """The sizes of a known model, or of the checkpoint in directory ``name`` (its ``config.json``). Else UserError."""
    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    path = Path(name) / "config.json"
    if not path.is_file():
        known_models = ", ".join(MODEL_SHAPES)
        raise UserError(f"{_shorten(name)!r} is neither a directory with a config.json nor a known model ({known_models})")
    try:
        document = json.loads(_read_text(path))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON") from None
    if not isinstance(document, dict) or document.get("model_type") != "llama":
        raise UserError(f"{path}: model_type must be llama: only LLaMA models can be planned")
    known = {item.name: document[item.name] for item in fields(ModelShape) if document.get(item.name) is not None}
    known.setdefault("num_key_value_heads", known.get("num_attention_heads"))
    return _with_prefix(str(path), lambda: _read(ModelShape, known, "", {"min": 1, "max": 10_000_000}))


def state_directory() -> Path:
    """The private directory for the state of a local cluster, created with mode 0700.

    $PIPEDEC_STATE_DIR, else $XDG_RUNTIME_DIR/pipedec, else ~/.cache/pipedec. UserError when it cannot be made, belongs to
    somebody else or lets others in.
    """
    chosen, runtime = os.environ.get("PIPEDEC_STATE_DIR"), os.environ.get("XDG_RUNTIME_DIR", "")
    if chosen:
        directory = Path(chosen).absolute()
    elif os.path.isabs(runtime) and os.path.isdir(runtime):
        directory = Path(runtime) / "pipedec"
    else:
        directory = Path(os.path.expanduser("~/.cache/pipedec"))
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}: set PIPEDEC_STATE_DIR to a directory of your own") from None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(f"{directory}: open to other users: chmod 700 it, or set PIPEDEC_STATE_DIR to a directory of your own")
    return directory


def _relative_to(folder: Path, place: str) -> str:
    return place if place == "none" or place in MODEL_SHAPES else str(folder / os.path.expanduser(place))


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a UTF-8 text file") from None


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML without aliases, duplicate keys and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not allowed", problem_mark=event.start_mark)
        if self.depth == MAX_YAML_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem="keys must be strings: quote it", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {_shorten(key)!r}", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, source: str) -> object:
    for number, line in enumerate(text.splitlines(), start=1):
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise UserError(f"{source}:{number}: tab in the indentation: use spaces")
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        line_number = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source}:{line_number}: {_shorten(error.problem or 'not valid YAML')}") from None
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{source}: not valid YAML") from None


def _read(cls: type[Config], value: object, path: str, rules: Mapping[str, Any] | None = None) -> Config:
    """Build the dataclass ``cls`` from a mapping; ``path`` names it, ``rules`` hold for fields that have none of their own."""
    if not isinstance(value, dict):
        raise UserError(f"{path or 'the file'}: must be a mapping, not {_type_name(value)}")
    hints = get_type_hints(cls)
    known: dict[str, Field[Any]] = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            raise UserError(f"{_join(path, '')}{_unknown('key', key, known)}")
    arguments = {}
    for key, item in known.items():
        if key in value:
            arguments[key] = _convert(hints[key], value[key], _join(path, key), item.metadata or rules or {})
        elif item.default is MISSING and item.default_factory is MISSING:
            raise UserError(f"{_join(path, key)}: missing")
    return _with_prefix(path, lambda: cls(**arguments), separator=".")


def _convert(hint: Any, value: object, path: str, rules: Mapping[str, Any]) -> Any:
    """``value`` as the type ``hint`` says, checked against the field's ``rules``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _read(typing.cast(type, hint), value, path, rules)
    if origin in (UnionType, typing.Union):
        return _convert_union(arguments, value, path, rules)
    if origin is Literal:
        return _check(_typed(str, value, path), path, {"choices": arguments})
    if origin is tuple:
        entries = _typed(list, value, path)
        return tuple(_convert(arguments[0], entry, f"{path}[{index}]", rules) for index, entry in enumerate(entries))
    if origin is Mapping:
        entries = _typed(dict, value, path)
        for key in entries:
            _check(key, path, {"choices": rules["keys"]} if "keys" in rules else {"name": True})
        limits = {rule: limit for rule, limit in rules.items() if rule in ("min", "max")}
        return {key: _convert(arguments[1], entry, f"{path}.{key}", limits) for key, entry in entries.items()}
    return _check(_typed(hint, value, path), path, rules)


def _convert_union(members: tuple[Any, ...], value: object, path: str, rules: Mapping[str, Any]) -> Any:
    """``X | None`` (leave the key out for None) or ``Literal | tuple`` (a word or a list)."""
    if any(get_origin(member) is Literal for member in members):
        wanted = tuple if isinstance(value, list) else Literal
        return _convert(next(member for member in members if get_origin(member) is wanted), value, path, rules)
    return _convert(next(member for member in members if member is not type(None)), value, path, rules)


def _typed(kind: type, value: object, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1e300 else math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        hint = ": quote it" if kind is str and not isinstance(value, (dict, list, type(None))) else ""
        raise UserError(f"{path}: must be {TYPE_NAMES[kind]}, not {_type_name(value)}{hint}")
    return value


def _check(value: Any, path: str, rules: Mapping[str, Any]) -> Any:
    if "choices" in rules and value not in rules["choices"]:
        raise UserError(f"{path}: must be one of {', '.join(rules['choices'])}, not {_shorten(value)!r}")
    if "name" in rules and not NAME.fullmatch(value):
        raise UserError(f"{path}: must be a name of letters, digits, '.', '_' and '-', not {_shorten(value)!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path}: must be a finite number")
    if value == "":
        raise UserError(f"{path}: must not be empty")
    for rule, wrong, words in (("min", lambda limit: value < limit, "at least"), ("max", lambda limit: value > limit, "at most"),
                               ("above", lambda limit: value <= limit, "more than")):  # fmt: skip
        if rule in rules and not isinstance(value, bool | str) and wrong(rules[rule]):
            raise UserError(f"{path}: must be {words} {rules[rule]}, not {_shorten(value)}")
    return value


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    suggestion = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
    return f"unknown {what} {_shorten(name)!r}: {suggestion}"


def _with_prefix(prefix: str, make: Callable[[], Config], separator: str = ": ") -> Config:
    try:
        return make()
    except UserError as error:
        raise UserError(f"{prefix}{separator if prefix else ''}{error}") from None


def _join(path: str, key: str) -> str:
    if not key:
        return f"{path}: " if path else ""
    return f"{path}.{key}" if path else key


def _type_name(value: object) -> str:
    return TYPE_NAMES.get(type(value), f"a {type(value).__name__}")


def _shorten(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
