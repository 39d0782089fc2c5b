"""The needs of a partition of a cluster.yaml on each host: memory, parts of checkpoints, links to other hosts.

Computed from the plan on the machine that has the file, as plain data that fits into JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from pipedec.checkpoints import CheckpointPart, KnownTensors, LayerSpan, merged, rank_parts
from pipedec.cluster.doctor.pairs import GpuPair
from pipedec.config import NONE, ClusterConfig
from pipedec.families import checkpoint_dtype, is_known, model_by_name
from pipedec.formats import DTYPE_BYTES
from pipedec.gguf import is_named
from pipedec.hardware import DEVICES
from pipedec.plan.partition import Plan, StagePlan
from pipedec.plan.placement import rank_places, spare_places

PROCESS_BYTES = 1_000_000_000  # RAM of a rank's process with torch, besides weights


@dataclass(frozen=True)
class GpuNeed:
    """The memory that ranks need on one GPU."""

    index: int  # the GPU's number among those of the host that torch can use
    ranks: tuple[int, ...]  # on this GPU
    least_bytes: int  # to start: weights, states, workspace, and keys and values of one request
    planned_bytes: int  # with the keys and values of the plan


@dataclass(frozen=True)
class HostNeeds:
    """The needs of all ranks of one host."""

    ranks: tuple[int, ...] = ()  # on this host
    has_spare: bool = False  # whether the host may take over further ranks
    gpus: tuple[GpuNeed, ...] = ()  # by their index
    memory_bytes: int = 0  # RAM to load weights: processes, weights that stay in RAM, the largest tensor for each rank
    checkpoint_bytes: int = 0  # that the ranks read of target and draft
    layers: tuple[tuple[int, int], ...] = ()  # the layers of every stage, as in ``rank_parts``
    models: Mapping[str, str | None] = field(default_factory=dict)  # checkpoints by key; None for a model without weights
    targets: tuple[str, ...] = ()  # other hosts to which the ranks send
    pairs: tuple[GpuPair, ...] = ()  # of a stage here and the next one, if stages use NCCL

    def parts(self) -> list[tuple[CheckpointPart, CheckpointPart]]:
        """For every checkpoint, the part that the ranks read, and the part that a spare may have to read later."""
        now = merged(part for rank in self.ranks for part in rank_parts(rank, self.layers, self.models))
        by_key = {part.key: part for part in now}
        named = [(key, model) for key, model in self.models.items() if model is not None]
        return [
            (part := by_key.get(key, CheckpointPart(key, model)), replace(part, is_whole=self.has_spare)) for key, model in named
        ]


def host_needs(config: ClusterConfig, plan: Plan) -> dict[str, HostNeeds]:
    """The needs of every host with a rank or a spare of the plan. Raises UserError as ``rank_places`` and ``model_by_name``."""
    config = config.for_partition(plan.partition)
    places = [place.host for place in rank_places(config)]
    spares = {place.host for place in spare_places(config)}
    links = list(dict.fromkeys(pair for pair in pairwise([*places, places[0]]) if pair[0] != pair[1]))
    layers = tuple((stage.layers.start, stage.layers.stop) for stage in plan.stages)
    named = {"target": config.target, "draft": config.draft, "bita": config.bita}
    models = {key: None if model == NONE or is_known(model) else checkpoint_path(model) for key, model in named.items()}
    found = {}
    for host in dict.fromkeys([*places, *spares]):
        ranks = [rank for rank in (*([plan.draft] if plan.draft else []), *plan.stages) if rank.placement.host == host]
        memory_bytes, checkpoint_bytes = PROCESS_BYTES if plan.draft is None and host == places[0] else 0, 0  # rank 0, no draft
        for rank in ranks:
            model = config.target if rank.rank else config.draft
            span = LayerSpan(rank.layers, rank.rank <= 1, rank.rank in (0, len(plan.stages)))
            its_tensors, largest = _tensor_bytes(model, span)
            # A rank that loads: its process, the largest tensor of the model, and its weights if they stay in RAM.
            on_cpu = 0 if DEVICES[rank.placement.device].is_gpu else rank.weight_bytes
            memory_bytes += PROCESS_BYTES + largest + on_cpu
            checkpoint_bytes += its_tensors
        found[host] = HostNeeds(
            tuple(rank for rank, its_host in enumerate(places) if its_host == host), host in spares, _gpus(config, plan, ranks),
            memory_bytes, checkpoint_bytes, layers, models,
            tuple(target for source, target in links if source == host), _pairs(config, plan, host),
        )  # fmt: skip
    return found


def _pairs(config: ClusterConfig, plan: Plan, host: str) -> tuple[GpuPair, ...]:
    """The pairs of stages that connect over NCCL, and whose first one is on ``host``; of those to one other host, the first."""
    places = [stage.placement for stage in plan.stages]
    if config.settings.cluster.transport == "gloo" or not all(DEVICES[place.device].is_gpu for place in places):
        return ()
    pairs = [
        GpuPair(one.index, other.index, None if other.host == host else other.host)
        for one, other in pairwise(places) if one.host == host
    ]  # fmt: skip
    first = {pair.host: pair for pair in reversed(pairs)}
    return tuple(pair for pair in pairs if pair.host is None or pair == first[pair.host])


def _tensor_bytes(model: str, span: LayerSpan) -> tuple[int, int]:
    """The sizes in the checkpoint of all tensors that a stage reads, and of the largest one of the model."""
    config, element_bytes = model_by_name(model), DTYPE_BYTES.get(checkpoint_dtype(model), 2)
    tensors, whole = KnownTensors(config), LayerSpan(range(config.num_hidden_layers), first=True, last=True)
    own, all_of_them = (tensors.file_bytes(one, element_bytes).values() for one in (span, whole))
    return sum(own), max(all_of_them)


def checkpoint_path(model: str) -> str:
    """The absolute path of a checkpoint, or the name of a model that is installed."""
    return model if is_named(model) else str(Path(model).absolute())


def _gpus(config: ClusterConfig, plan: Plan, ranks: Sequence[StagePlan]) -> tuple[GpuNeed, ...]:
    given, slots = config.settings.limits.kv_cache_bytes, plan.max_model_len + plan.rows * (plan.passage + 1)
    on_gpus: dict[int, list[StagePlan]] = {}
    for rank in ranks:
        if DEVICES[rank.placement.device].is_gpu:
            on_gpus.setdefault(rank.placement.index, []).append(rank)
    needs = []
    for index, together in sorted(on_gpus.items()):
        fixed = sum(rank.fixed_bytes for rank in together)
        least = fixed + sum(slots * rank.kv_token_bytes if given is None else given for rank in together)
        planned = sum(rank.total_bytes for rank in together)
        needs.append(GpuNeed(index, tuple(rank.rank for rank in together), least, max(least, planned)))
    return tuple(needs)
