"""Which parts and files of the checkpoints each host of a partition needs: those of its ranks, and all if it has a spare, which
may take over any rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipedec.checkpoints import CheckpointPart, merged, rank_parts
from pipedec.config import NONE, ClusterConfig
from pipedec.core.errors import UserError
from pipedec.families import is_known
from pipedec.plan.partition import plan
from pipedec.plan.placement import Placement, rank_places


def checkpoints_of(config: ClusterConfig) -> dict[str, str]:
    """The checkpoints by key. UserError if one of them is a shape without weights."""
    for key, model in (("target", config.target), ("draft", config.draft)):
        if is_known(model):
            raise UserError(f"{key}: {model} is a shape for planning and has no weights: give a checkpoint directory")
    models = {"target": config.target, "draft": config.draft, "bita": config.bita}
    return {key: model for key, model in models.items() if model != NONE}


def host_parts(config: ClusterConfig, spares: Sequence[Placement] = ()) -> dict[str, list[CheckpointPart]]:
    """The parts of each checkpoint that each host with a rank or a spare needs, in the order of its first rank.

    ``config`` has one partition. Raises UserError as ``partition.plan`` and ``checkpoints_of``.
    """
    models = checkpoints_of(config)
    layers = [(stage.layers.start, stage.layers.stop) for stage in plan(config).stages]
    parts: dict[str, list[CheckpointPart]] = {}
    for rank, place in enumerate(rank_places(config)):
        parts.setdefault(place.host, []).extend(rank_parts(rank, layers, models))
    for place in spares:
        parts.setdefault(place.host, []).extend(CheckpointPart(key, model, is_whole=True) for key, model in models.items())
    return {host: merged(found) for host, found in parts.items()}


@dataclass(frozen=True)
class NeededFile:
    """A file with weights, and who needs it."""

    key: str
    path: Path
    num_bytes: int | None  # None if it is not on this machine
    hosts: tuple[str, ...]


def needed_files(parts: Mapping[str, Sequence[CheckpointPart]]) -> list[NeededFile]:
    """Every file with weights that a host needs, by the ``parts`` of each. An index is enough; its shards need not be here."""
    hosts: dict[tuple[str, Path], list[str]] = {}
    for host, its_parts in parts.items():
        for part in its_parts:
            for file in part.files():
                hosts.setdefault((part.key, file), []).append(host)
    return [
        NeededFile(key, file, file.stat().st_size if file.is_file() else None, tuple(needed_by))
        for (key, file), needed_by in sorted(hosts.items(), key=lambda item: ("target draft bita".find(item[0][0]), item[0][1]))
    ]
