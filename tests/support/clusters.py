"""Configurations of clusters, as a cluster.yaml would describe them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from pipedec.config import ClusterConfig, ServerConfig, cluster_from


def clustered(servers: Iterable[ServerConfig], partitions: Mapping[str, Mapping[str, Any]], **keys: Any) -> ClusterConfig:
    """The configuration of a file with these keys."""
    return cluster_from(_plain({"servers": list(servers), "partitions": partitions, **keys}))


def _plain(value: Any) -> Any:
    """As YAML has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
