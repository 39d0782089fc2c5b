"""Which device of which host each rank takes, hosts in the order of the shortest way around the ring, and how many layers each
stage: even, explicit, or balanced by speed and memory.

Does not know whether the models fit there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from pipedec.config import AUTO, NONE, ClusterConfig, DeviceConfig, ServerConfig
from pipedec.config.cluster import PartitionConfig
from pipedec.core.errors import UserError
from pipedec.hardware import DEVICES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Placement:
    """One device: ``index`` counts the GPUs of a host in the order of the configuration, and apart from them its processors."""

    host: str
    device: str
    index: int


@dataclass(frozen=True)
class Places:
    """The devices of a partition's ranks.

    Attributes:
        draft: of rank 0, which may be a stage's; None without a draft model.
        host: of rank 0.
        stages: of ranks 1..n.
        listed_us: the latencies around the ring in the order of the file, if another order is shorter; else None.
    """

    draft: Placement | None
    host: str
    stages: tuple[Placement, ...]
    listed_us: float | None = None

    @property
    def hosts(self) -> list[str]:
        """Around the ring, from rank 0 to the last stage."""
        return [self.host, *(place.host for place in self.stages)]


def rank_places(config: ClusterConfig, partition_name: str | None = None) -> tuple[Placement, ...]:
    """The devices of ranks 0..n, of which rank 0 may share a stage's. It computes on a processor if there is no draft model.

    UserError if there is no such partition, or it needs more devices than the hosts have.
    """
    name, partition = config.find_partition(partition_name)
    places = place_ranks(config.for_partition(name), name, partition)
    return (places.draft or Placement(places.host, "cpu", 0), *places.stages)


def spare_places(config: ClusterConfig, count: int | None = None) -> tuple[Placement, ...]:
    """The devices that stand by for a partition: those that the file names, else ``count`` of those that the partition leaves.

    ``count`` devices, those of hosts without a rank first; None for all that the file names. UserError if there are fewer.
    """
    taken = rank_places(config)
    hosts = {place.host for place in taken}
    free = [place for server in config.servers for place in _devices_of(server) if place not in taken]
    if config.spares:
        free = _take_spares(free, config)
    elif count is None:
        return ()
    found = sorted(free, key=lambda place: place.host in hosts)[:count]
    if count is not None and len(found) < count:
        raise UserError(f"--spares {count}: the partition leaves {len(found)} devices: add servers, or devices to a server")
    return tuple(found)


def place_ranks(config: ClusterConfig, name: str, partition: PartitionConfig) -> Places:
    """The devices of the draft and of the stages. UserError when there are too few.

    The draft takes the last device of its kind on its host, so that stages keep the front ones; if it shares one, that of the
    last stage there. Of several hosts that it may be on, the one with the shortest way around the ring.
    """
    path, wanted = f"partitions.{name}.draft_device", partition.draft_device
    if config.draft != NONE and wanted is None:
        raise UserError(f"{path}: missing: the draft model needs a device (or set draft: none)")
    if wanted is None or wanted.host != AUTO:
        return _place_beside(config, name, partition, wanted)
    found, mistakes = [], [UserError(f"{path}: no server has a {wanted.device}")]
    for server in config.servers:
        if wanted.device in server.devices:
            try:
                found.append(_place_beside(config, name, partition, replace(wanted, host=server.host)))
            except UserError as error:
                mistakes.append(error)
    if not found:
        raise mistakes[-1]
    return min(found, key=lambda places: ring_latency_us(config, places.hosts))


def _place_beside(config: ClusterConfig, name: str, partition: PartitionConfig, wanted: DeviceConfig | None) -> Places:
    """The devices of the stages beside that of rank 0, which is on the host of stage 1 if none is ``wanted``."""
    free = [place for server in config.servers for place in _devices_of(server)]
    _take_spares(free, config)
    path = f"partitions.{name}"
    drafts = wanted is not None and config.draft != NONE
    draft = _take(free, wanted, f"{path}.draft_device", last=True) if wanted and drafts and not wanted.shared else None
    if partition.devices:
        entries = [entry for entry in partition.devices for _ in range(entry.count)]
        places = [_take(free, entry, f"{path}.devices") for entry in entries]
    else:
        hosts = partition.servers or tuple(server.host for server in config.servers)
        places = [place for host in hosts for place in free if place.host == host]
    stages = partition.settings.cut.stages
    if len(places) < stages:
        raise UserError(f"{path}.stages: {stages} stages need as many devices, but {len(places)} are free")
    places, listed_us = places[:stages], None
    if config.network.links and not partition.devices and partition.settings.cut.layers == AUTO:
        places, listed_us = _in_shortest_order(config, wanted.host if wanted else None, places)
    if wanted and drafts and wanted.shared:
        found = [place for place in places if (place.host, place.device) == (wanted.host, wanted.device)]
        if not found:
            message = f"no stage takes a {wanted.device} on {wanted.host}: name a stage's device, or leave shared out"
            raise UserError(f"{path}.draft_device: {message}")
        draft = found[-1]
    return Places(draft, wanted.host if wanted else places[0].host, tuple(places), listed_us)


def _in_shortest_order(config: ClusterConfig, first: str | None, places: list[Placement]) -> tuple[list[Placement], float | None]:
    """The places of stages, host by host in the order with the shortest way around the ring from rank 0's host ``first`` (None:
    stage 1's); and the latencies around it as listed, if that is another order."""
    hosts = list(dict.fromkeys(place.host for place in places))
    start, stops = (hosts[0], hosts[1:]) if first is None else (first, hosts)

    def length(source: str, target: str) -> int:
        """In whole nanoseconds, whose sum does not depend on their order."""
        return round(1000 * config.network.link(source, target).latency_us)

    order = shortest_round(start, stops, cache(length))
    if order == stops:
        return places, None
    ordered = order if first is not None else [start, *order]
    listed_us = ring_latency_us(config, [start, *(place.host for place in places)])
    return [place for host in ordered for place in places if place.host == host], listed_us


def ring_latency_us(config: ClusterConfig, hosts: Sequence[str]) -> float:
    """One-way latencies of all links around a ring of ranks on these hosts, from rank 0."""
    return sum(config.network.link(source, target).latency_us for source, target in itertools.pairwise([*hosts, hosts[0]]))


EXACT_STOPS = 8  # up to so many stops all orders are compared


def shortest_round(start: str, stops: Sequence[str], length: Callable[[str, str], int]) -> list[str]:
    """The order of ``stops`` with the shortest way from ``start`` through all and back, of equals the first as they are listed.

    Beyond ``EXACT_STOPS`` it is a local optimum, and at most as long as the listed order.
    """

    def whole(order: Iterable[str]) -> int:
        return sum(length(*pair) for pair in itertools.pairwise([start, *order, start]))

    if len(stops) <= EXACT_STOPS:
        return list(min(itertools.permutations(stops), key=whole))
    return _uncrossed(list(stops), whole)


def _uncrossed(order: list[str], whole: Callable[[Iterable[str]], int]) -> list[str]:
    """Reversing no part of the way makes it shorter (2-opt)."""
    while True:
        ends = itertools.combinations(range(len(order) + 1), 2)
        best = min(([*order[:a], *reversed(order[a:b]), *order[b:]] for a, b in ends), key=whole)
        if whole(best) >= whole(order):
            return order
        order = best


def _devices_of(server: ServerConfig) -> list[Placement]:
    kinds = [kind for kind, count in server.devices.items() for _ in range(count)]
    same = [[DEVICES[other].is_gpu for other in kinds[:index]].count(DEVICES[kind].is_gpu) for index, kind in enumerate(kinds)]
    return [Placement(server.host, kind, index) for kind, index in zip(kinds, same, strict=True)]


def _take_spares(free: list[Placement], config: ClusterConfig) -> list[Placement]:
    """The spares that the file names, each the last device of its kind, like the draft's. UserError when there are too few."""
    return [_take(free, entry, "spares", last=True) for entry in config.spares for _ in range(entry.count)]


def _take(free: list[Placement], wanted: DeviceConfig, path: str, last: bool = False) -> Placement:
    found = [place for place in free if (place.host, place.device) == (wanted.host, wanted.device)]
    if not found:
        raise UserError(f"{path}: no free {wanted.device} is left on {wanted.host}")
    chosen = found[-1 if last else 0]
    free.remove(chosen)
    return chosen


def even_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as equal as possible; the first stages take the remainder. UserError for too many stages."""
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    if stages < 1:
        raise UserError(f"stages must be at least 1, not {stages}")
    size, longer = divmod(num_layers, stages)
    return explicit_layers([size + (stage < longer) for stage in range(stages)], num_layers)


def explicit_layers(counts: Sequence[int], num_layers: int) -> list[range]:
    """The layers of each stage from their numbers. UserError unless they are positive and add up to ``num_layers``."""
    if any(count < 1 for count in counts):
        raise UserError("every stage needs at least 1 layer")
    if sum(counts) != num_layers:
        raise UserError(f"layers sum to {sum(counts)}, the target has {num_layers}")
    return list(itertools.starmap(range, itertools.pairwise(itertools.accumulate(counts, initial=0))))


_PER_MS = 10**9  # times are compared in picoseconds, whole numbers whose sums do not depend on their order
_NEVER = 2**61


def balance(
    layer_ms: Sequence[Sequence[float]], extra_ms: Sequence[float], layer_bytes: Sequence[int], room: Sequence[int]
) -> list[int]:
    """The number of layers of each stage, at least 1, that makes the slowest stage as fast as possible.

    Of such cuts it is the one whose layers are done earliest: the sum over all layers of what their stage takes with those before
    them is the least. Of equals, the first stages have the most layers.

    Args:
        layer_ms: for each stage, milliseconds of every layer of the model there.
        extra_ms: for each stage, milliseconds of what it computes beside layers.
        layer_bytes: memory of every layer.
        room: for each stage, memory for layers, in bytes.

    Raises:
        UserError: the layers do not fit.
    """
    import numpy as np  # which commands need not load for their help

    stages, num_layers = len(layer_ms), len(layer_bytes)
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    for stage, stage_room in enumerate(room, start=1):
        if stage_room < min(layer_bytes):
            raise UserError(f"stage {stage} has no room for a single layer")

    def spans(of_layers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sums over the layers [first, last) at [..., first, last]."""
        ends = np.concatenate([np.zeros_like(of_layers[..., :1]), of_layers.cumsum(-1)], -1)
        return ends[..., None, :] - ends[..., :, None]

    def whole(times: Sequence[float] | Sequence[Sequence[float]]) -> NDArray[np.int64]:
        return np.rint(np.asarray(times) * _PER_MS).astype(np.int64)

    is_part = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=bool), 1)
    fits = is_part & (spans(np.array(layer_bytes)) <= np.array(room)[:, None, None])
    takes = spans(whole(layer_ms)) + whole(extra_ms)[:, None, None]
    slowest = _best_ends(np.where(fits, takes, _NEVER), np.maximum)[0]
    if slowest >= _NEVER:
        raise UserError(f"the {stages} stages have room for {_most_layers(fits)} layers, the target has {num_layers}")
    done = np.where(is_part, takes, 0).cumsum(2)
    _, ends = _best_ends(np.where(fits & (takes <= slowest), done, _NEVER), np.add)
    cuts = list(itertools.accumulate(ends, lambda first, of_first: int(of_first[first]), initial=0))
    return [last - first for first, last in itertools.pairwise(cuts)]


def _best_ends(costs: NDArray[Any], joined: Callable[[Any, Any], Any]) -> tuple[int, list[NDArray[Any]]]:
    """The least cost of a cut, and for each stage by its first layer where its layers end then, of equals the last.

    Args:
        costs: of the layers [first, last) on each stage, [stage, first, last].
        joined: the cost of two parts together.
    """
    import numpy as np

    stages, size, _ = costs.shape
    rest = np.full(size, _NEVER)
    rest[-1] = 0
    ends = []
    for stage in reversed(range(stages)):
        whole = np.minimum(joined(costs[stage], rest), _NEVER)
        ends.append(size - 1 - whole[:, ::-1].argmin(1))
        rest = whole.min(1)
    return int(rest[0]), ends[::-1]


def _most_layers(fits: NDArray[Any]) -> int:
    """The most layers, from the first on, that the stages hold."""
    import numpy as np

    reached = np.arange(fits.shape[1]) == 0
    most = 0
    for stage in fits:
        reached = (reached[:, None] & stage).any(0)
        most = max(most, *np.flatnonzero(reached), 0)
    return int(most)
