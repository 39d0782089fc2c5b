"""The number of layers of each stage: even, explicit, or balanced by the speed and memory of each device."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from pipedec.core import UserError


def even_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as equal as possible; the first stages take the remainder. UserError for too many stages."""
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    if stages < 1:
        raise UserError(f"stages must be at least 1, not {stages}")
    size, longer = divmod(num_layers, stages)
    starts = [stage * size + min(stage, longer) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def explicit_layers(counts: Sequence[int], num_layers: int) -> list[range]:
    """The layers of each stage from their numbers. UserError unless they are positive and add up to ``num_layers``."""
    if any(count < 1 for count in counts):
        raise UserError("every stage needs at least 1 layer")
    if sum(counts) != num_layers:
        raise UserError(f"layers sum to {sum(counts)}, the target has {num_layers}")
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def balance(num_layers: int, layer_ms: Sequence[float], extra_ms: Sequence[float], room: Sequence[int]) -> list[int]:
    """The number of layers of each stage, at least 1, that makes the slowest stage as fast as possible.

    Stage i takes ``extra_ms[i] + layers · layer_ms[i]`` and holds at most ``room[i]`` layers. Each further layer goes to the
    stage that is fastest with it (of equals the first). This is exact: it takes the cheapest of all (stage, number of layers)
    steps, so no other split has a lower maximum. UserError if the layers do not fit.
    """
    stages = len(layer_ms)
    if stages > num_layers:
        raise UserError(f"{stages} stages, but the target has {num_layers} layers: use at most {num_layers}")
    for stage, layers in enumerate(room, start=1):
        if layers < 1:
            raise UserError(f"stage {stage} has no room for a single layer")
    if sum(room) < num_layers:
        raise UserError(f"the {stages} stages have room for {sum(room)} layers, the target has {num_layers}")
    counts = [1] * stages
    queue = [(extra_ms[stage] + 2 * layer_ms[stage], stage) for stage in range(stages) if room[stage] > 1]
    heapq.heapify(queue)
    for _ in range(num_layers - stages):
        _, stage = heapq.heappop(queue)
        counts[stage] += 1
        if counts[stage] < room[stage]:
            heapq.heappush(queue, (extra_ms[stage] + (counts[stage] + 1) * layer_ms[stage], stage))
    return counts
