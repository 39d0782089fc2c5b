"""Configurations of clusters, as a cluster.yaml would describe them, and what tests ask of running ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.supervisor import Supervisor
from pipedec.config import ClusterConfig, ServerConfig
from pipedec.config.cluster import cluster_from
from pipedec.scheduler import ClientScheduler, RunStatus, connect
from support.processes import wait_until


def clustered(servers: Iterable[ServerConfig], partitions: Mapping[str, Mapping[str, Any]], **keys: Any) -> ClusterConfig:
    """The configuration of a file with these keys."""
    return cluster_from(_plain({"servers": list(servers), "partitions": partitions, **keys}))


def with_settings(running: RunHandle, **settings: Any) -> RunHandle:
    """A running cluster that describes itself with other settings, by name."""
    description = running.description
    return replace(running, description=structs.replace(description, settings=description.settings.replaced(**settings)))


def _plain(value: Any) -> Any:
    """As YAML has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def scheduler_of(cluster: Supervisor) -> ClientScheduler:
    assert cluster.scheduler is not None
    return cluster.scheduler


def client_of(cluster: Supervisor, silence_seconds: float = 60.0) -> Client:
    return Client(scheduler_of(cluster), cluster.check, silence_seconds)


def status_of(cluster: Supervisor) -> RunStatus:
    return scheduler_of(cluster).status()


def keys_of(cluster: Supervisor, but: Iterable[bytes] = ()) -> set[bytes]:
    """All keys in the cluster's own Redis, except for those with one of these words in their names."""
    with connect(cluster.address.redis_url) as redis:
        return {key for key in redis.keys("*") if not any(word in key for word in but)}


def read_until(client: Client, condition: Callable[[], object], seconds: float = 120.0) -> list[Reply]:
    """Read until ``condition`` holds; returns the replies that have ended meanwhile, in their order."""
    ended: list[Reply] = []

    def holds() -> object:
        ended.extend(client.read(0.02))
        return condition()

    assert wait_until(holds, seconds)
    return ended


def read_all(client: Client, *replies: Reply) -> list[Reply]:
    """Read until all of these have ended; returns those that have ended meanwhile, in their order."""
    return read_until(client, lambda: all(reply.has_ended for reply in replies))
