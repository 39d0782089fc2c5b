"""What a partition of a cluster.yaml needs of each host: memory, parts of checkpoints, links to other hosts.

Taken from the plan, on the machine that has the file. Plain data that fits into JSON, for the host that is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pipedec.config import NONE, ClusterConfig, checkpoint_dtype, model_shape
from pipedec.hardware import DEVICES, DTYPE_BYTES
from pipedec.plan.partition import Plan, StagePlan
from pipedec.plan.placement import rank_places, spare_places

PROCESS_BYTES = 1_000_000_000  # of memory for a rank's process with torch, beside weights


@dataclass(frozen=True)
class GpuNeed:
    """What ranks on one GPU take of its memory.

    Attributes:
        index: of the GPU among those of the host that torch can use.
        ranks: on this GPU.
        least_bytes: weights, workspace, and keys and values of one request: with less they cannot start.
        planned_bytes: with the keys and values that the plan counts on.
    """

    index: int
    ranks: tuple[int, ...]
    least_bytes: int
    planned_bytes: int


@dataclass(frozen=True)
class Part:
    """Layers of a checkpoint from ``start`` to before ``stop``, for a rank.

    Attributes:
        first, last: whether the rank reads the embedding, and the norm and the head.
        is_spare: for ranks that the host may take over, and does not have yet.
    """

    start: int
    stop: int
    first: bool
    last: bool
    is_spare: bool = False


@dataclass(frozen=True)
class HostNeeds:
    """What the ranks of one host need together.

    Attributes:
        memory_bytes: RAM while weights are loaded: processes, the weights of ranks on the processor, the largest tensor of each.
        checkpoint_bytes: what the ranks read of target and draft.
        parts: what they read, by checkpoint; all of one that is not named.
        targets: other hosts to which they send.
        has_ranks: whether there are any, beside spares.
    """

    gpus: tuple[GpuNeed, ...] = ()
    memory_bytes: int = 0
    checkpoint_bytes: int = 0
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    has_ranks: bool = True


def host_needs(config: ClusterConfig, plan: Plan) -> dict[str, HostNeeds]:
    """The needs of every host with a rank or a spare of the planned partition.

    Raises:
        UserError: as ``rank_places`` and ``model_shape``.
    """
    config = config.for_partition(plan.partition)
    places = [place.host for place in rank_places(config)]
    spares = {place.host for place in spare_places(config)}
    links = list(dict.fromkeys(pair for pair in pairwise([*places, places[0]]) if pair[0] != pair[1]))
    found = {}
    for host in dict.fromkeys([*places, *spares]):
        ranks = [rank for rank in _planned(plan) if rank.placement.host == host]
        memory = sum(_loading_bytes(config, rank) for rank in ranks) + PROCESS_BYTES * (host == places[0] and plan.draft is None)
        found[host] = HostNeeds(
            _gpus(config, plan, ranks), memory, sum(_checkpoint_bytes(config, plan, rank) for rank in ranks),
            _parts(config, plan, ranks, host == places[0], host in spares),
            tuple(target for source, target in links if source == host), host in places,
        )  # fmt: skip
    return found


def _planned(plan: Plan) -> list[StagePlan]:
    return [*([plan.draft] if plan.draft else []), *plan.stages]


def _gpus(config: ClusterConfig, plan: Plan, ranks: Sequence[StagePlan]) -> tuple[GpuNeed, ...]:
    given, slots = config.settings.limits.kv_cache_bytes, plan.max_model_len + plan.rows * (plan.num_groups + 1)
    on_gpus: dict[int, list[StagePlan]] = {}
    for rank in ranks:
        if DEVICES[rank.placement.device].is_gpu:
            on_gpus.setdefault(rank.placement.index, []).append(rank)
    needs = []
    for index, together in sorted(on_gpus.items()):
        fixed = sum(rank.weight_bytes + rank.workspace_bytes for rank in together)
        least = fixed + sum(slots * rank.kv_token_bytes if given is None else given for rank in together)
        planned = sum(rank.total_bytes for rank in together)
        needs.append(GpuNeed(index, tuple(rank.rank for rank in together), least, max(least, planned)))
    return tuple(needs)


def _parts(
    config: ClusterConfig, plan: Plan, ranks: Sequence[StagePlan], has_rank_0: bool, has_spare: bool
) -> dict[str, tuple[Part, ...]]:
    num_layers = plan.stages[-1].layers.stop
    target = [
        Part(rank.layers.start, rank.layers.stop, rank.rank == 1, rank.rank == len(plan.stages)) for rank in ranks if rank.rank
    ]
    parts = {config.target: (*target, *([Part(0, num_layers, True, True, is_spare=True)] if has_spare else []))}
    if config.draft != NONE and not has_rank_0:
        whole = Part(0, model_shape(config.draft).num_hidden_layers, True, True, is_spare=True)
        parts[config.draft] = (whole,) if has_spare else ()
    return parts


def _loading_bytes(config: ClusterConfig, rank: StagePlan) -> int:
    """RAM of a rank that loads: its process, the largest tensor of the model, and its weights if they stay in it."""
    model = config.target if rank.rank else config.draft
    shape = model_shape(model)
    tensor = max(shape.embedding_parameters, shape.hidden_size * shape.intermediate_size) * _element_bytes(model)
    return PROCESS_BYTES + tensor + (0 if DEVICES[rank.placement.device].is_gpu else rank.weight_bytes)


def _checkpoint_bytes(config: ClusterConfig, plan: Plan, rank: StagePlan) -> int:
    model = config.target if rank.rank else config.draft
    shape, ends = model_shape(model), (rank.rank == 1) + (rank.rank == len(plan.stages))
    in_part = len(rank.layers) * shape.layer_parameters + ends * shape.embedding_parameters
    return (in_part if rank.rank else shape.parameters) * _element_bytes(model)


def _element_bytes(model: str) -> int:
    return DTYPE_BYTES.get(checkpoint_dtype(model), 2)
