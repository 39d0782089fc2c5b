"""Which parts of the checkpoints each host of a partition needs: those of its ranks, and all if it has a spare.

A spare takes over whatever rank is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipedec.checkpoints import Part, merged, rank_parts
from pipedec.config import NONE, ClusterConfig
from pipedec.core import UserError
from pipedec.hardware import MODEL_SHAPES
from pipedec.plan.partition import plan
from pipedec.plan.placement import Placement, rank_places


def checkpoints_of(config: ClusterConfig) -> dict[str, str]:
    """The checkpoints by key. UserError if one of them is a shape without weights."""
    for key, model in (("target", config.target), ("draft", config.draft)):
        if model in MODEL_SHAPES:
            raise UserError(f"{key}: {model} is a shape to plan with and has no weights: give a checkpoint directory")
    models = {"target": config.target, "draft": config.draft, "bita": config.bita}
    return {key: model for key, model in models.items() if model != NONE}


def host_parts(config: ClusterConfig, spares: Sequence[Placement] = ()) -> dict[str, list[Part]]:
    """What each host with a rank or a spare needs of each checkpoint, in the order of its first rank.

    Args:
        config: with one partition.

    Raises:
        UserError: as ``plan.plan`` and ``checkpoints_of``.
    """
    models = checkpoints_of(config)
    layers = [(stage.layers.start, stage.layers.stop) for stage in plan(config).stages]
    parts: dict[str, list[Part]] = {}
    for rank, place in enumerate(rank_places(config)):
        parts.setdefault(place.host, []).extend(rank_parts(rank, layers, models))
    for place in spares:
        parts.setdefault(place.host, []).extend(Part(key, model, is_whole=True) for key, model in models.items())
    return {host: merged(found) for host, found in parts.items()}
