"""Configurations of clusters, as a cluster.yaml would describe them, and running clusters with other settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from pipedec.client.running import Running
from pipedec.config import ClusterConfig, ServerConfig
from pipedec.config.cluster import cluster_from


def clustered(servers: Iterable[ServerConfig], partitions: Mapping[str, Mapping[str, Any]], **keys: Any) -> ClusterConfig:
    """The configuration of a file with these keys."""
    return cluster_from(_plain({"servers": list(servers), "partitions": partitions, **keys}))


def with_settings(running: Running, **settings: Any) -> Running:
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
